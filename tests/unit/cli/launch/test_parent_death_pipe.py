"""Nothing outlives a supervisor that was killed, and nobody comes into the way of what is still ending."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.redis_servers import kept_busy

from services.cli.launch.embedded_redis import EmbeddedRedis
from services.cli.launch.parent_death_pipe import stack_lock
from services.cli.launch.run_lock import AlreadyRunning, run_lock, running_pid

ROOT = Path(__file__).parents[4]
# What the processes of the stack run: each says in a file that it is up, and what SIGTERM found it doing.
MODULES = {
    "tidy": """
        import pathlib, signal, sys, time
        def leave(*_):
            print("a line for nobody", flush=True)
            time.sleep(0.5)
            pathlib.Path("tidied").touch()
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path("up-tidy").touch()
        time.sleep(60)
    """,
    "deaf": """
        import pathlib, signal, time
        from services.cli.launch.embedded_redis import EmbeddedRedis
        # what is waited for has not to be waited for here
        EmbeddedRedis.stop.__defaults__ = (0.5,)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("up-deaf").touch()
        time.sleep(60)
    """,
    "busy": """
        import pathlib
        from services.cli.launch.embedded_redis import EmbeddedRedis
        EmbeddedRedis.stop.__defaults__ = (0.5,)
        pathlib.Path("up-busy").touch()
        while True:
            pass
    """,
}
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from services.cli.launch.child import ChildSpec
from services.cli.launch.log_view import LogView
from services.cli.launch.plan import python
from services.cli.launch.run_lock import run_lock
from services.cli.launch.supervisor import Supervisor

async def main():
    folder = Path(sys.argv[1])
    async with run_lock(folder), Supervisor(LogView(sys.stderr), folder, grace=2) as stack:
        await stack.start_redis()
        stack.start([ChildSpec(name, python(name)) for name in sys.argv[2:]])
        while len(stack.pids) < len(sys.argv) - 1:
            await asyncio.sleep(0.01)
        print(*stack.pids.values(), flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="l2-") as name:
        path = Path(name)
        for module, text in MODULES.items():
            lines = text.strip("\n").split("\n")
            (path / f"{module}.py").write_text("\n".join(line[8:] for line in lines))
        yield path


def started(folder: Path, data: Path, *modules: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A supervisor in a process group of its own, and the processes of its stack, which are all up."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-c", SUPERVISOR, str(data), *modules]
    with (folder / "log").open("ab") as log:
        supervisor = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder, start_new_session=True
        )
    assert supervisor.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in supervisor.stdout.readline().split()]
    assert len(processes) == len(modules) + 1, (folder / "log").read_text()
    until = time.monotonic() + 20
    while missing := [name for name in modules if not (folder / f"up-{name}").exists()]:
        assert time.monotonic() < until, missing
        time.sleep(0.02)
    return supervisor, processes


def killed(supervisor: subprocess.Popen[str], *, group: bool = False) -> None:
    if group:
        os.killpg(supervisor.pid, signal.SIGKILL)
    else:
        supervisor.kill()
    supervisor.wait()
    assert supervisor.stdout is not None
    supervisor.stdout.close()


@pytest.mark.parametrize("group", [False, True], ids=["alone", "with its process group"])
def test_after_kill_9_of_the_supervisor_its_processes_end_in_order(folder: Path, group: bool) -> None:
    supervisor, processes = started(folder, folder / "data", "tidy")
    # nothing else watches over them: what is killed with the supervisor makes no difference
    assert {child.pid for child in psutil.Process(supervisor.pid).children(recursive=True)} == {
        c.pid for c in processes
    }
    killed(supervisor, group=group)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    assert (folder / "tidied").exists()
    assert "Redis is now ready to exit" in (folder / "data/redis/redis.log").read_text().replace("Valkey", "Redis")


def test_processes_that_are_deaf_for_sigterm_end_too_and_so_does_a_redis_that_is(folder: Path) -> None:
    supervisor, processes = started(folder, folder / "data", "deaf", "busy")
    with kept_busy(EmbeddedRedis(folder / "data/redis").url):
        killed(supervisor)
        assert psutil.wait_procs(processes, timeout=20)[1] == []


async def test_a_run_waits_for_what_is_left_of_an_earlier_one(folder: Path) -> None:
    supervisor, processes = started(folder, folder / "data", "tidy")
    said: list[str] = []
    killed(supervisor)
    async with run_lock(folder / "data", patience=30, say=said.append):
        assert (folder / "tidied").exists()
        # the system lets go of a lock a moment before the process is gone
        assert psutil.wait_procs(processes, timeout=2)[1] == []
    assert "processes of an earlier run" in said[0]


async def test_what_does_not_end_is_named_and_not_run_beside(folder: Path) -> None:
    supervisor, processes = started(folder, folder / "data", "tidy")
    (frozen,) = [child for child in processes if "tidy" in child.cmdline()]
    frozen.suspend()
    killed(supervisor)
    with pytest.raises(AlreadyRunning, match=rf"end them with: kill -9 {frozen.pid}, or"):
        async with run_lock(folder / "data", patience=0.5):
            pass
    frozen.kill()
    async with run_lock(folder / "data", patience=30):
        pass
    # nobody was left to end it
    with EmbeddedRedis(folder / "data/redis", reuse=True):
        pass
    assert psutil.wait_procs(processes, timeout=10)[1] == []


async def test_a_data_folder_belongs_to_one_run_at_a_time_whatever_path_leads_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    assert running_pid(folder) is None
    async with run_lock(folder):
        (tmp_path / "link").symlink_to(folder)
        monkeypatch.chdir(tmp_path)
        for path in (folder, tmp_path / "link", Path("data"), Path("link/../link")):
            assert running_pid(path) == os.getpid()
            with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}.*--data-dir"):
                async with run_lock(path):
                    pass
    assert running_pid(folder) is None
    async with run_lock(folder):
        pass


def test_of_two_runs_that_start_on_one_folder_at_the_same_moment_one_works(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "link").symlink_to(folder / "data")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    with contextlib.ExitStack() as opened:
        runs = []
        for path in ("data", str(folder / "link")):
            log = opened.enter_context((folder / "log").open("ab"))
            command = [sys.executable, "-c", SUPERVISOR, path]
            one = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder)
            runs.append(opened.enter_context(one))
            opened.callback(one.kill)
        # each says which Redis it has, or ends
        told = [one.stdout.readline() for one in runs if one.stdout is not None]
        assert sorted(map(bool, told)) == [False, True], (folder / "log").read_text()
        (refused,) = [one for one, said in zip(runs, told, strict=True) if not said]
        assert refused.wait(20) == 1
        assert "LoCAL2 already runs on the data folder" in (folder / "log").read_text()
        (works,) = [one for one in runs if one is not refused]
        # one server
        (redis,) = psutil.Process(works.pid).children(recursive=True)
        assert "server" in redis.name()
    EmbeddedRedis(folder / "data/redis", reuse=True).stop_left()
    assert psutil.wait_procs([redis], timeout=10)[1] == []


async def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    looking = True

    def look() -> None:
        while looking:
            running_pid(tmp_path)

    async with run_lock(tmp_path):
        pass
    looker = asyncio.create_task(asyncio.to_thread(look))
    try:
        for _ in range(50):
            async with run_lock(tmp_path):
                pass
    finally:
        looking = False
        await looker


def test_child_of_an_ended_supervisor_does_nothing(folder: Path) -> None:
    held, ours = os.pipe()
    os.close(ours)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "LOCAL2_PARENT_DEATH_PIPE": f"{held}:5:{folder}"}
    command = [sys.executable, "-m", "services.cli.launch.parent_death_pipe", "tidy"]
    # a stack that has taken over meanwhile
    server, others = EmbeddedRedis(folder / "redis"), stack_lock(folder)
    others.share()
    with server:
        subprocess.run(command, env=env, cwd=folder, pass_fds=(held,), timeout=20, check=False)
        assert server.alive()
    os.close(held)
    others.close()
