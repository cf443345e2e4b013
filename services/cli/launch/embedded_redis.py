"""The Redis server of one machine: a child process with its data in a folder of its own.

`local2 run` and every test that needs a Redis start it with this class. The folder is locked by the server itself: the
lock lives exactly as long as the server process, also when the program that started it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from services.cli.launch import redis_data
from services.cli.launch.redis_servers import EmbeddedRedisError, Version, server_for

# The smallest limit of the systems we run on is 104 bytes with the closing zero (108 on Linux).
MAX_SOCKET_PATH = 100
# So many seconds the system may take to end what was killed: on a busy machine, longer than a server takes to answer.
_DYING = 60.0


def can_start(data_dir: Path) -> None:
    """Raises EmbeddedRedisError when the folder's data are damaged, or no server here can read them."""
    redis_data.check(data_dir)
    server_for(redis_data.writer_of(data_dir), data_dir)


class EmbeddedRedis:
    """A server on `data_dir` (made with mode 700), append-only file on, reached by a unix socket in that folder.

    port: None for the socket only; 0 for a free loopback TCP port as well, or its number (then `url` is that of TCP,
        with a password that stays in the folder). `start` again after `stop` or `kill` gives the same URL.
    reuse: when a server already runs on the folder, use it, and stop it at the end; else that is an error.
    extra: directives of its configuration file; a server that is reused is told them too, so each must be one that
        CONFIG SET takes.

    All methods block for milliseconds; call them by `asyncio.to_thread` where a loop runs.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        reuse: bool = False,
        timeout: float = 10.0,
        extra: dict[str, str] | None = None,
    ) -> None:
        # by one path, whatever link leads there: the socket's name may depend on it
        self.data_dir = data_dir.resolve()
        self._wants_port = port
        self._port = port or 0
        self._reuse = reuse
        self._timeout = timeout
        self._extra = extra or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._adopted: int | None = None
        self._password = ""
        self._version: Version | None = None
        self._log_began = 0

    @property
    def url(self) -> str:
        """What redis-py's `from_url` takes; the port is known after the first start."""
        if self._wants_port is None:
            return f"unix://{quote(str(self.socket_path))}?db=0"
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def socket_path(self) -> Path:
        """In the data folder, or in a private folder for temporary files when that path is too long for a socket."""
        path = self.data_dir / "redis.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"local2-{os.getuid()}" / f"{digest}.sock"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        return self._adopted if self._adopted is not None and self._locked() else None

    @property
    def log_path(self) -> Path:
        return self.data_dir / "redis.log"

    def alive(self) -> bool:
        """True when the server answers."""
        return self.pid is not None and self._ask("PING") == "+PONG"

    def keys(self) -> int:
        """How many keys the server has, or 0 when it does not answer."""
        count = self._ask("DBSIZE")[1:]
        return int(count) if count.isdigit() else 0

    def start(self) -> str:
        """Starts the server that wrote the folder, or the first that is here, and returns its URL once it answers.

        Raises EmbeddedRedisError; DataDamaged before anything is touched.
        """
        if self.pid is not None:
            return self.url
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.data_dir.chmod(0o700)
            _private_folder(self.socket_path.parent)
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise EmbeddedRedisError(f"the folder {self.data_dir} cannot be used: {exc.strerror or exc}") from exc
        try:
            while not self._lock(lock):
                try:
                    return self._adopt()
                except EmbeddedRedisError:
                    if self._locked():
                        raise
                    # it was just ending
                    self._forget()
            redis_data.check(self.data_dir)
            self._password = self._kept_password() if self._wants_port is not None else ""
            # A free port can be taken by somebody else before the server has it: then another one.
            attempts = 3 if self._wants_port == 0 and not self._port else 1
            for attempt in range(attempts):
                if self._wants_port == 0 and not self._port:
                    self._port = _free_port()
                try:
                    self._spawn(lock)
                    redis_data.remember(self.data_dir, self._version)
                    return self.url
                except EmbeddedRedisError as exc:
                    if attempt + 1 == attempts or isinstance(exc, redis_data.DataDamaged):
                        raise
                    self._port = 0
            raise AssertionError("unreachable")
        except OSError as exc:
            self.kill()
            where = f" ({exc.filename})" if exc.filename else ""
            raise EmbeddedRedisError(
                f"the folder {self.data_dir} cannot be used: {exc.strerror or exc}{where}"
            ) from exc
        finally:
            # The server holds the same lock by its own copy of the descriptor.
            os.close(lock)

    def stop(self, timeout: float = 10.0) -> None:
        """Graceful (the append-only file is written out), then by force. Does nothing when it does not run."""
        pid = self.pid
        if pid is not None:
            # SIGTERM is Redis' own SHUTDOWN, and needs no connection.
            os.kill(pid, signal.SIGTERM)
            if self._ended(timeout):
                # everything is on disk now
                with contextlib.suppress(OSError):
                    redis_data.remember(self.data_dir, self._version or redis_data.writer_of(self.data_dir))
            else:
                os.kill(pid, signal.SIGKILL)
                self._ended(_DYING)
        self._forget()

    def stop_left(self) -> None:
        """Ends a server that another program has left on the folder."""
        if self._locked() and (pid := self._told().get("pid")):
            self._adopted = int(pid)
            self.stop()

    def kill(self) -> None:
        """Ends the server as a crash would."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            self._ended(_DYING)
        self._forget()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _lock_path(self) -> Path:
        return self.data_dir / "redis.lock"

    def _lock(self, lock: int) -> bool:
        """False when a server holds the lock; another program that only looks at it is waited for."""
        for _ in range(10):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.005)
        return False

    def _spawn(self, lock: int) -> None:
        config = self.data_dir / "redis.conf"
        _write_private(config, self._config())
        binary, self._version = server_for(redis_data.writer_of(self.data_dir), self.data_dir)
        with self.log_path.open("ab") as log:
            self._log_began = log.tell()
            process = subprocess.Popen(
                [binary, str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.data_dir,
                pass_fds=(lock,),
                # Ctrl-C in a terminal reaches the participants first; the server goes when it is told to.
                start_new_session=True,
            )
        self._process = process
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"pid": process.pid, "port": self._port}).encode(), 0)
        try:
            self._wait_until_ready()
        except BaseException:
            process.kill()
            process.wait()
            self._process = None
            raise

    def _config(self) -> str:
        values = {
            "dir": str(self.data_dir),
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "port": str(self._port),
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "daemonize": "no",
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A power cut leaves half a command at the end of the file: drop that, keep the rest.
            "aof-load-truncated": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            # Milliseconds after which a script that goes on may be ended, and everybody is told.
            "busy-reply-threshold": "1000",
            # A title would stand in the place of its environment, by which it is known who has started it.
            "set-proc-title": "no",
            **({"requirepass": self._password} if self._password else {}),
            **self._extra,
        }
        return "".join(f"{name} {_quoted(value)}\n" for name, value in values.items())

    def _adopt(self) -> str:
        running = self._told()
        pid = running.get("pid")
        if not self._reuse or not pid:
            raise EmbeddedRedisError(
                f"a Redis server (pid {pid or 'unknown'}) already runs on {self.data_dir};"
                " stop what started it, or choose another LOCAL2_DATA_DIR"
            )
        if bool(running.get("port")) != (self._wants_port is not None):
            raise EmbeddedRedisError(
                f"the Redis server (pid {pid}) on {self.data_dir} was started"
                f" {'with' if running.get('port') else 'without'} a TCP port; stop it first"
            )
        self._adopted = int(pid)
        self._port = int(running.get("port") or 0)
        self._password = self._kept_password() if self._wants_port is not None else ""
        self._wait_until_ready()
        for name, value in self._extra.items():
            if (answer := self._ask(f"CONFIG SET {name} {_quoted(value)}")) != "+OK":
                raise EmbeddedRedisError(
                    f"the Redis server (pid {pid}) on {self.data_dir} does not take"
                    f" {name} {value} ({answer}); stop it first"
                )
        return self.url

    def _told(self) -> dict[str, Any]:
        """What whoever started the server on the folder has written about it."""
        try:
            return dict(json.loads(self._lock_path.read_bytes()))
        except (OSError, ValueError):
            return {}

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout
        while (answer := self._ask("PING")) != "+PONG":
            if answer.startswith("-LOADING"):
                # A long append-only file is read at its own speed; only silence is a failure.
                deadline = time.monotonic() + self._timeout
            if self.pid is None:
                if what := redis_data.unreadable(self._logged()):
                    raise redis_data.DataDamaged(self.data_dir, f"{what} (log: {self.log_path})")
                raise EmbeddedRedisError(f"the Redis server stopped at its start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise EmbeddedRedisError(
                    f"the Redis server did not answer within {self._timeout:g} s: {self._last_words()}"
                )
            time.sleep(0.002)

    def _ask(self, command: str) -> str:
        """The first line of the answer to an inline command, or an empty string when there is none."""
        lines = ([f"AUTH {self._password}"] if self._password else []) + [command]
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(str(self.socket_path))
                connection.sendall("".join(f"{line}\r\n" for line in lines).encode())
                with connection.makefile("rb") as answers:
                    return [answers.readline().decode(errors="replace").strip() for _ in lines][-1]
        except OSError:
            return ""

    def _locked(self) -> bool:
        with contextlib.suppress(FileNotFoundError), self._lock_path.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def _ended(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while self.pid is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def _forget(self) -> None:
        self._process = None
        self._adopted = None

    def _kept_password(self) -> str:
        path = self.data_dir / "redis.password"
        if not path.exists():
            _write_private(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="ascii").strip()

    def _last_words(self) -> str:
        lines = self._logged()
        return f"{lines[-1]} (log: {self.log_path})" if lines else "nothing was logged"

    def _logged(self) -> list[str]:
        """What the server has written to its log since it was started, as far as it matters."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(max(self._log_began, os.fstat(log.fileno()).st_size - 100_000))
            return log.read().decode(errors="replace").strip().splitlines()
        return []


def _private_folder(path: Path) -> None:
    """Makes a folder that only this user can enter. Raises EmbeddedRedisError when it is somebody else's."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if path.is_symlink() or found.st_uid != os.getuid():
        raise EmbeddedRedisError(f"{path} belongs to somebody else; set TMPDIR to a folder of your own")
    path.chmod(0o700)


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
