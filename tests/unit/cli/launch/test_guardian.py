"""Nothing outlives a supervisor that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from services.cli.launch.guardian import Guardian

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A supervisor with a guardian and two children, one of them deaf for SIGTERM.
SUPERVISOR = """
import subprocess, sys, time
from services.cli.launch.guardian import Guardian
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
first = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE, start_new_session=True)
last = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
first.stdout.readline()
guardian = Guardian(grace=1)
guardian.watch(first.pid)
guardian.watch(last.pid, "last")
print(first.pid, last.pid, guardian.pid, flush=True)
time.sleep(60)
"""


def test_after_kill_9_of_the_supervisor_no_process_is_left(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[4])
    env = {**os.environ, "PYTHONPATH": root}
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True, env=env) as supervisor:
        assert supervisor.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
        assert len(processes) == 3
        supervisor.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_a_process_taken_out_again_is_left_alone() -> None:
    with (
        subprocess.Popen(SLEEP, start_new_session=True) as kept,
        subprocess.Popen(SLEEP, start_new_session=True) as gone,
    ):
        with Guardian(grace=1) as guardian:
            guardian.watch(kept.pid)
            guardian.watch(gone.pid)
            guardian.forget(kept.pid)
        assert gone.wait(5) == -signal.SIGTERM
        assert kept.poll() is None
        kept.kill()


def test_a_killed_guardian_does_not_take_the_supervisor_with_it() -> None:
    guardian = Guardian()
    os.kill(guardian.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(guardian.pid)], timeout=5)
    guardian.watch(os.getpid())
    guardian.forget(os.getpid())
    guardian.close()
