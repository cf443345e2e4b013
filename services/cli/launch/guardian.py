"""A guardian: a tiny process that ends the others when the supervisor dies without being able to do it.

It reads process ids from a pipe. The pipe ends with the supervisor, also after `kill -9`; then the guardian sends
SIGTERM, waits, and sends SIGKILL to what is left. A shell is enough for it, on every system.
"""

from __future__ import annotations

import contextlib
import subprocess
from types import TracebackType
from typing import Literal, Self

# `+ PID` and `last PID` add one (the last ones are ended after the others), `- PID` takes one out.
_SCRIPT = """
grace=$1; first=; last=
without() { new=; for p in $2; do [ "$p" = "$1" ] || new="$new $p"; done; echo "$new"; }
alive() { new=; for p in $1; do kill -0 "$p" 2>/dev/null && new="$new $p"; done; echo "$new"; }
end() {
  left=$1; n=0
  for p in $left; do kill -TERM "$p" 2>/dev/null; done
  while left=$(alive "$left"); [ -n "$left" ] && [ "$n" -lt $((grace * 10)) ]; do sleep 0.1; n=$((n + 1)); done
  for p in $left; do kill -KILL "$p" 2>/dev/null; done
}
while read -r word pid; do
  case $word in
    +) first="$first $pid" ;;
    last) last="$last $pid" ;;
    -) first=$(without "$pid" "$first"); last=$(without "$pid" "$last") ;;
  esac
done
end "$first"; end "$last"
"""


class Guardian:
    """Knows which processes must not outlive this one. `grace`: seconds between SIGTERM and SIGKILL."""

    def __init__(self, grace: int = 8) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "local2-guardian", str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal and the end of the supervisor's process group must not reach it.
            start_new_session=True,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, pid: int, order: Literal["first", "last"] = "first") -> None:
        self._say(f"{'+' if order == 'first' else 'last'} {pid}\n")

    def forget(self, pid: int) -> None:
        """Call it as soon as the process has been waited for: its id may belong to another one from then on."""
        self._say(f"- {pid}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        # A guardian that somebody killed cannot help any more; the stack runs on without.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())

    def close(self) -> None:
        """Ends the guardian, which first ends what it still watches."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
