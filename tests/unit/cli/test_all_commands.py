"""Every command of `local2`, as Typer lists them: text between brackets, 80 columns, pipes, no stack, a wrong key,
a Redis that is full, arguments that are missing.

The gateway's own description says what each route answers; all texts in it look like markup. A new command is covered
by itself.
"""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import typer.main
from rich.table import Table
from rich.text import Text
from support.described import document

from services.cli import app as command_line
from services.cli.terminal import Terminal, console, errors

# Rich would swallow or refuse each of these, were they read as markup, an emoji or a link.
HOSTILE = "[0] [bold]MARK[/b] [/] :smile: [link=x]"
CHECKOUT = Path(__file__).parents[3]
# What `local2 --help` must not import: each of them takes tens of milliseconds.
HEAVY = {"asyncio", "httpx", "pydantic", "rich", "yaml", "psutil", "orjson", "redis", "shared.bus", "shared.contracts"}
# They serve or ask a terminal, or look at the machine: other tests try them.
APART = {"run", "chat", "doctor", "stories"}


def commands(group: Any, *names: str) -> Iterator[tuple[str, ...]]:
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


ROOT: Any = typer.main.get_command(command_line.app)
ALL = [names for names in commands(ROOT) if names[0] not in APART]


def found(names: tuple[str, ...]) -> Any:
    command = ROOT
    for name in names:
        command = command.get_command(None, name)
    return command


def arguments(names: tuple[str, ...], folder: Path) -> list[str]:
    """What a command must be given: text that looks like markup, files with a line of it."""
    given: list[str] = []
    for param in found(names).params:
        if not param.required:
            continue
        value = HOSTILE
        kind = str(param.type_descriptor.annotation)
        if "Literal" in kind:
            value = str(get_args(param.type_descriptor.annotation)[0])
        elif "int" in kind or "float" in kind:
            value = "1"
        elif "Path" in kind:
            path = folder / f"[b]{param.name}.jsonl"
            path.write_text(json.dumps({"query": HOSTILE, "answer": HOSTILE}) + "\n", encoding="utf-8")
            value = str(path)
        given += [value] if param.param_type_name == "argument" else [param.opts[0], value]
    return given


# ── a gateway that answers as it is described ────────────────────────────────────────────────────────────────────


_PAGES = ("cursor", "next", "earlier")


class Described:
    def __init__(self, described: dict[str, Any]) -> None:
        self._schemas = described["components"]["schemas"]
        self._routes = [
            (re.compile("/?" + re.sub(r"\\{\w+\\}", ".+", re.escape(path.lstrip("/"))) + "$"), operations)
            for path, operations in sorted(described["paths"].items(), key=lambda item: ("{" in item[0], -len(item[0])))
        ]

    def answer(self, method: str, path: str) -> tuple[str, bytes]:
        for pattern, operations in self._routes:
            operation = operations.get(method.lower())
            if operation is None or not pattern.match(path):
                continue
            content = next(
                r.get("content", {}) for code, r in sorted(operation["responses"].items()) if code.startswith("2")
            )
            if "application/json" in content or not content:
                body = self.value(content.get("application/json", {}).get("schema", {}))
                return "application/json", json.dumps(body).encode()
            kind = next(iter(content))
            return kind, (json.dumps({"text": HOSTILE, "kind": HOSTILE}) + "\n").encode()
        return "application/json", b"{}"

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth + 1)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self.value(schema[name][0], depth)
        if "const" in schema or "enum" in schema:
            return schema.get("const", (schema.get("enum") or [None])[0])
        match schema.get("type"):
            case "string":
                return HOSTILE
            case "integer" | "number":
                return schema.get("minimum", 1)
            case "boolean":
                return True
            case "array":
                return [self.value(schema.get("items", {}), depth + 1)] if depth < 8 else []
            case "null":
                return None
            case _:
                # there is no further page
                parts = {n: p for n, p in schema.get("properties", {}).items() if n not in _PAGES}
                ends = {name: None for name in _PAGES if name in schema.get("properties", {})}
                return ends | {name: self.value(part, depth + 1) for name, part in parts.items()} if depth < 8 else {}


class Gateway(ThreadingHTTPServer):
    described: Described
    # what every request is refused with: a status and a code
    refusal: tuple[int, str] | None = None


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def _answer(self) -> None:
        # a connection that is closed before all was read is an error for who writes
        if self.headers.get("transfer-encoding") == "chunked":
            while length := int(self.rfile.readline(), 16):
                self.rfile.read(length + 2)
            self.rfile.readline()
        self.rfile.read(int(self.headers.get("content-length") or 0))
        status, kind = 200, "application/json"
        if self.server.refusal is not None:
            status, code = self.server.refusal
            body = json.dumps({"error": {"code": code, "message": HOSTILE}}).encode()
        else:
            kind, body = self.server.described.answer(self.command, self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        server.described = Described(document())
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _sigterm_ends_the_tests() -> Iterator[None]:
    """As before the entry point, which takes it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(params=["pipe", "80 columns"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for one in (console, errors):
        monkeypatch.setattr(one, "width", 1_000 if request.param == "pipe" else 80)
    return str(request.param)


def local2(
    names: tuple[str, ...], folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    given: list[str] | None = None,
) -> tuple[int, str, str]:  # fmt: skip
    """(exit code, output, errors) of a command against a gateway. given: arguments, in the place of what it needs."""
    for name, value in (("LOCAL2_API_URL", url), ("LOCAL2_API_KEY", "k"), ("LOCAL2_DATA_DIR", str(folder / "data"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["local2", *names, *(arguments(names, folder) if given is None else given)])
    monkeypatch.setattr("sys.stdin", io.StringIO("no\n"))
    # built once, not with each command
    monkeypatch.setattr(command_line, "app", ROOT)
    try:
        command_line.main()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    said = capsys.readouterr()
    return code, said.out, said.err


def unfolded(text: str) -> str:
    return re.sub(r"[\s│┃…]", "", text)


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_text_of_others_is_printed_as_it_is(
    names: tuple[str, ...], gateway: Gateway, terminal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gateway.refusal = None
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    code, out, err = local2(names, tmp_path, url, monkeypatch, capsys)
    assert code in (0, 1, 2), (out, err)
    assert "Traceback" not in out + err
    text = unfolded(out + err)
    if terminal == "pipe":
        assert text.count("MARK") == text.count(unfolded("[0] [bold]MARK[/b]")), out + err
    assert code == 0 or text, "a failure without a word"


@pytest.mark.parametrize("names", ALL, ids=" ".join)
@pytest.mark.parametrize(
    ("refusal", "wanted"),
    [
        (None, "start the stack with: local2 run"),
        ((401, "unauthorized"), "set LOCAL2_API_KEY"),
        ((503, "bus_full"), "what to do: local2 doctor"),
    ],
    ids=["no stack", "wrong key", "full Redis"],
)
def test_the_first_line_says_what_is_wrong_and_what_to_do(
    names: tuple[str, ...], refusal: tuple[int, str] | None, wanted: str, gateway: Gateway, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # a reserved port that nobody listens at refuses
        port = free.getsockname()[1] if refusal is None else gateway.server_address[1]
        gateway.refusal = refusal
        code, out, err = local2(names, tmp_path, f"http://127.0.0.1:{port}", monkeypatch, capsys)
    assert code in (1, 2), (out, err)
    assert "Traceback" not in out + err
    line = err.splitlines()[0]
    assert line.startswith("local2: ")
    # what is wrong with a file or an argument is said before anything is sent
    usual = wanted in line
    assert usual or "[b]" in line or "the file" in line or HOSTILE in line or "it is used so" in line, err


@pytest.mark.parametrize("group", [(), *sorted({names[:-1] for names in ALL if len(names) > 1})], ids=" ".join)
def test_help_of_a_group_has_whole_sentences_in_80_columns(
    group: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = local2(group, tmp_path, "http://127.0.0.1:9", monkeypatch, capsys, given=["--help"])
    assert code == 0
    assert not [line for line in out.partition("Commands:")[2].splitlines() if line.endswith("...")]


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_a_wrong_use_is_one_line_that_shows_the_right_one(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = local2(names, tmp_path, "http://127.0.0.1:9", monkeypatch, capsys, given=["--[nothing]"])
    assert (code, out) == (2, "")
    path = " ".join(names)
    # Typer names the program after how the tests were started
    assert re.fullmatch(rf"local2: .*--\[nothing\].*; it is used so: .*{path}.* --help says more\)\n", err), err


@pytest.mark.parametrize(
    ("command", "listing"),
    [
        (["sessions", "show", "x"], "local2 sessions list"),
        (["files", "rm", "x"], "local2 files list"),
        (["keys", "revoke", "x"], "local2 keys list"),
        (["keys", "zone", "x", "Asia/Tokyo"], "local2 keys list"),
        (["dead-letters", "replay", "1-1"], "local2 dead-letters list"),
        (["memory", "show", "x"], "local2 memory list"),
        (["memory", "topics", "delete", "x"], "local2 memory topics list"),
        (["knowledge", "forget", "x"], "local2 knowledge show"),
        (["experiment", "stop", "x"], "local2 experiment show"),
    ],
)
def test_what_is_not_there_is_answered_with_where_to_look(
    command: list[str], listing: str, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    gateway.refusal = (404, "not_found")
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    code, _, err = local2((), tmp_path, url, monkeypatch, capsys, given=command)
    assert code == 1
    assert err.splitlines()[0].endswith(f"; what there is: {listing}")


def test_a_question_that_is_not_answered_changes_nothing(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def left(*_args: object, **_options: object) -> bool:
        raise typer.Abort

    monkeypatch.setattr("typer.confirm", left)
    gateway.refusal = None
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    code, out, err = local2((), tmp_path, url, monkeypatch, capsys, given=["memory", "delete", "--everything"])
    assert (code, out, err) == (1, "", "local2: given up; nothing was changed\n")


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["local2", "--version"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert (ended.value.code, capsys.readouterr().out.split()[0]) == (0, "local2")


def test_help_imports_no_command_and_no_heavy_package() -> None:
    program = "import sys; from services.cli.app import main; sys.argv[1:] = ['--help']; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "typer" in imported
    assert not imported & HEAVY
    assert {name for name in imported if name.startswith("services.")} == {"services.cli", "services.cli.app"}


def test_mistyped_command_is_answered_with_the_near_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["local2", "memroy"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert "Did you mean 'memory'?" in capsys.readouterr().err


def test_every_command_has_a_help_text_of_its_own() -> None:
    texts = {name: ROOT.get_command(None, name).help for name in ROOT.list_commands(None)}
    assert texts == {name: place.help for name, place in command_line.COMMANDS.items()}
    assert len(set(texts.values())) == len(texts)


def test_a_terminal_reads_no_markup_wherever_text_stands() -> None:
    out = io.StringIO()
    here = Terminal(file=out)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE + "\x1b[31m")
    here.print(table)
    here.print(HOSTILE, style="red")
    here.print(HOSTILE, Text(HOSTILE))
    assert out.getvalue().count(HOSTILE) == 6
    assert "\x1b" not in out.getvalue()


def test_a_long_line_is_broken_by_nobody_and_a_table_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    here = Terminal(file=out, width=80)
    here.print("x" * 300)
    table = Table("a", "b")
    table.add_row("y " * 100, "z")
    here.print(table)
    first, *rest = out.getvalue().splitlines()
    assert first == "x" * 300
    assert max(map(len, rest)) <= 80
