"""What the server itself can do: redis-benchmark (C) when it is there, else one socket with hiredis."""

from __future__ import annotations

import csv
import io
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import hiredis
from bus_port import MESSAGE_BYTES
from tables import table

_STREAM = "bench:floor"
_COMMAND = ["XADD", _STREAM, "MAXLEN", "~", "10000", "*", "id", "1", "payload", "x" * MESSAGE_BYTES]
_HOW = "redis-benchmark is not on the PATH (Debian, Ubuntu: apt install redis-tools); measured with one socket instead"
_SECONDS = 1.0


def floor(url: str, levels: Sequence[int]) -> dict[str, Any]:
    """One hop only: an XADD of the same message, answered. `levels`: commands under way on one connection."""
    binary = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    how = _HOW
    try:
        found = {level: _benchmark(binary, url, level) for level in levels} if binary else {}
    except RuntimeError as exc:
        binary, how, found = None, f"{exc}; measured with one socket instead", {}
    found = found or {level: _socket(url, level) for level in levels}
    rows = [
        [f"{level} in flight", f"{v['p50'] * 1e6:.0f} µs", f"{v['p99'] * 1e6:.0f} µs", f"{v['rate']:,.0f}"]
        for level, v in found.items()
    ]
    title = f"Floor: one XADD of {MESSAGE_BYTES} bytes (a round trip has two), " + (
        "redis-benchmark" if binary else "a Python socket with hiredis"
    )
    text = table(title, ["one connection", "p50", "p99", "XADD/s"], rows)
    return {"values": found, "text": text if binary else f"{text}\n  {how}"}


def _benchmark(binary: str, url: str, level: int) -> dict[str, float]:
    parts = urlsplit(url)
    count = 5_000 if level == 1 else 50_000
    run = subprocess.run(
        [binary, "-h", str(parts.hostname), "-p", str(parts.port), *(["-a", parts.password] if parts.password else []),
         "-c", "1", "-P", str(level), "-n", str(count), "--csv", *_COMMAND],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    rows = [row for row in csv.reader(io.StringIO(run.stdout)) if len(row) > 5]
    if run.returncode or len(rows) < 2:
        # without the command line: it holds the password
        raise RuntimeError(f"redis-benchmark ended with status {run.returncode}: {run.stderr.strip()[:300]}")
    values = dict(zip(rows[0], rows[-1], strict=True))
    return {
        "rate": float(values["rps"]),
        "p50": float(values["p50_latency_ms"]) / 1000,
        "p99": float(values["p99_latency_ms"]) / 1000,
    }


def _socket(url: str, level: int) -> dict[str, float]:
    parts = urlsplit(url)
    pipeline = hiredis.pack_command(tuple(_COMMAND)) * level
    latencies: list[float] = []
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = hiredis.Reader()

        def send(data: bytes, replies: int) -> None:
            connection.sendall(data)
            while replies:
                reader.feed(connection.recv(262_144))
                while (reply := reader.gets()) is not False:
                    if isinstance(reply, hiredis.ReplyError):
                        raise RuntimeError(str(reply))
                    replies -= 1

        if parts.password:
            send(hiredis.pack_command(("AUTH", parts.password)), 1)
        began = time.perf_counter()
        while (now := time.perf_counter()) < began + _SECONDS:
            send(pipeline, level)
            latencies.append(time.perf_counter() - now)
        took = time.perf_counter() - began
    latencies.sort()
    return {
        "rate": len(latencies) * level / took,
        "p50": latencies[len(latencies) // 2],
        "p99": latencies[len(latencies) * 99 // 100],
    }
