"""What the tests start ends with them, also when they are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.redis_servers import kept_busy

from services.cli.launch.embedded_redis import EmbeddedRedis

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
PROGRAM = """
import sys, time
from pathlib import Path
from services.cli.launch.embedded_redis import EmbeddedRedis
from support.guard import guard

guard()
server = EmbeddedRedis(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_busy_redis_does_not_outlive_the_process_that_has_started_it(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "redis")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as owner:
        assert owner.stdout is not None
        server = psutil.Process(int(owner.stdout.readline()))
        with kept_busy(EmbeddedRedis(tmp_path / "redis").url):
            owner.send_signal(number)
            assert psutil.wait_procs([server], timeout=20)[1] == []
