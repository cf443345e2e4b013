"""The console as the gateway serves it: reachable, closed to the rest of the web, and consistent in itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_gateway import ADMIN_KEY, gateway_settings, serving

from services.cli.launch.run import welcome
from services.cli.settings import ClientSettings
from services.gateway.app import create_app
from services.gateway.gateway import Gateway
from services.gateway.routes import console
from shared.records.journal import EntryType

FOLDER = Path(console.__file__).parents[1] / "console"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
PAGE = (FOLDER / "index.html").read_text(encoding="utf-8")
OUTSIDE = re.compile(r"(?:https?:)?//[\w.-]+\.\w|wss?:", re.IGNORECASE)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text_of: dict[str, str] = {}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.text_of[self._open] = self.text_of.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""


def elements() -> Elements:
    parser = Elements()
    parser.feed(PAGE)
    return parser


def script(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key, of a gateway without a bus."""
    app = create_app(Gateway(gateway_settings("redis://127.0.0.1:9", tmp_path)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


# ── served ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_page_needs_neither_a_key_nor_the_bus(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text == PAGE


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
async def test_every_file_of_the_console_has_its_type(http: httpx.AsyncClient, path: Path) -> None:
    answer = await http.get(f"/console/{path.name}")
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert answer.status_code == 200
    assert answer.headers["content-type"].partition(";")[0] == types[path.suffix]
    assert answer.content == console.FILES[path.name][0]


@pytest.mark.parametrize(
    "path", ["/console/", "/console/console.py", "/console/..%2fapp.py", "/console/%2e%2e/app.py", "/console/a/b.js"]
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("path", ["/", "/console/console.js"])
async def test_the_policy_allows_the_gateway_s_own_files_only(http: httpx.AsyncClient, path: str) -> None:
    headers = (await http.get(path)).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    # whatever is named beside default-src narrows it: no directive opens anything
    assert set(policy.values()) <= {"'self'", "'none'", "'script'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


async def test_what_the_page_asks_for_needs_a_key(redis_url: str, tmp_path: Path) -> None:
    async with serving(gateway_settings(redis_url, tmp_path)) as site, httpx.AsyncClient(base_url=site.url) as http:
        assert (await http.get("/")).status_code == 200
        for path in ("/sessions", "/participants", "/bus/streams", "/bus/events"):
            assert (await http.get(path)).status_code == 401, path


# ── closed ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_no_file_names_an_address_elsewhere(path: Path) -> None:
    # the name of the SVG language is an identifier, not a place that is asked
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert OUTSIDE.findall(text) == []


def test_the_page_has_no_inline_script_or_style() -> None:
    page = elements()
    assert page.text_of.get("script", "").strip() == ""
    for tag, attrs in page.found:
        assert tag != "style"
        assert not [name for name in attrs if name == "style" or name.startswith("on")], tag
        if tag == "script":
            assert attrs.get("src")


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_turns_text_into_html_or_code(name: str) -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextual"
    assert re.findall(ways, script(name)) == []


# ── consistent ───────────────────────────────────────────────────────────────────────────────────────────────


def test_every_field_has_a_label_and_every_button_a_name() -> None:
    page = elements()
    labelled = {attrs.get("for") for tag, attrs in page.found if tag == "label"}
    ids = [attrs["id"] for _, attrs in page.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.found:
        if tag in ("input", "textarea", "select") and attrs.get("type") != "checkbox":
            assert attrs.get("id") in labelled, attrs
        for reference in ("aria-controls", "aria-labelledby", "aria-describedby", "for"):
            assert attrs.get(reference) is None or attrs[reference] in ids, attrs


def test_the_page_and_its_scripts_name_only_what_is_there() -> None:
    ids = {attrs["id"] for _, attrs in elements().found if "id" in attrs}
    asked = {name: re.findall(r'byId\("([\w-]+)"\)|querySelector\("#([\w-]+)', script(name)) for name in SCRIPTS}
    assert sum(map(len, asked.values())) > 20
    for name, found in asked.items():
        assert {one or other for one, other in found} <= ids, name
    files = [attrs.get("src") or attrs.get("href") for tag, attrs in elements().found if tag in ("script", "link")]
    assert {str(file) for file in files} <= {f"console/{name}" for name in console.FILES}


def test_every_import_is_exported_where_it_is_said_to_be() -> None:
    imported = {
        (name, source): [part.strip() for part in names.split(",") if part.strip()]
        for name in SCRIPTS
        for names, source in re.findall(r'import \{([^}]*)\} from "\./([^"]+)";', script(name))
    }
    assert len(imported) > 8
    for (name, source), names in imported.items():
        exported = re.findall(r"export (?:async )?(?:function|class|const) (\w+)", script(source))
        assert set(names) <= set(exported), f"{name} from {source}"
    for name in SCRIPTS:
        statements = re.findall(r"^import .*$", script(name), re.MULTILINE)
        assert len(statements) == sum(1 for importer, _ in imported if importer == name), name


def test_every_kind_of_journal_entry_is_understood() -> None:
    known = set(re.findall(r'case "([\w.]+)":', script("turn.js")))
    # a persona that works has nothing to say yet: its part appears with any entry that names it
    assert {kind.value for kind in EntryType} - known == {"persona.working"}
    assert known <= {kind.value for kind in EntryType}


_SKIPPED = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
      | (?<=[(,=:!&|?{};\n\[ ])/(?![/*\s])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*""",
    re.VERBOSE | re.DOTALL,
)


def unbalanced(source: str) -> str:
    """Where brackets do not match, "" where they do. Strings, comments and regular expressions do not count."""
    stack: list[str] = []
    at = 0
    while at < len(source):
        in_template = bool(stack) and stack[-1] == "`"
        char = source[at]
        if in_template and char == "\\":
            at += 2
            continue
        if in_template and source.startswith("${", at):
            stack.append("}")
            at += 2
            continue
        if not in_template and (skipped := _SKIPPED.match(source, at)):
            at = skipped.end()
            continue
        at += 1
        if char == "`":
            if in_template:
                stack.pop()
            else:
                stack.append("`")
        elif in_template:
            continue
        elif char in "([{":
            stack.append({"(": ")", "[": "]", "{": "}"}[char])
        elif char in ")]}" and (not stack or stack.pop() != char):
            return f"line {source.count(chr(10), 0, at) + 1}: unexpected {char}"
    return f"missing {stack[-1]}" if stack else ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_brackets_of_every_script_match(name: str) -> None:
    assert unbalanced(script(name)) == ""
    # the check itself sees a bracket that is missing
    assert unbalanced(script(name).replace("\n}\n", "\n", 1)) != ""


# ── run by an engine, where there is one ─────────────────────────────────────────────────────────────────────

NODE = shutil.which("node")
with_node = pytest.mark.skipif(NODE is None, reason="no JavaScript engine (node) on this machine")


def run(folder: Path, code: str, **instead: str) -> Any:
    """What a module that can import the console's files prints, as JSON. instead: other text of a script, by its name
    without `.js`."""
    assert NODE is not None
    for name in SCRIPTS:
        (folder / name).write_text(instead.get(Path(name).stem, script(name)), encoding="utf-8")
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (folder / "main.js").write_text(code, encoding="utf-8")
    done = subprocess.run([NODE, "main.js"], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def after(folder: Path, entries: list[tuple[str, str, dict[str, Any]]]) -> Any:
    """The turn after these (id, type, data)."""
    code = 'import { apply, newTurn, textOf } from "./turn.js"; const turn = newTurn("?");'
    code += f"for (const [id, type, data] of {json.dumps(entries)}) apply(turn, type, id, data);"
    return run(folder, code + "console.log(JSON.stringify({ ...turn, answer: textOf(turn.pieces) }));")


@with_node
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_parses(name: str, tmp_path: Path) -> None:
    (tmp_path / "module.mjs").write_text(script(name), encoding="utf-8")
    done = subprocess.run(
        [str(NODE), "--check", "module.mjs"], cwd=tmp_path, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


TEXT = {"p", "pre", "code", "h3", "hr", "blockquote", "ul", "ol", "li", "a", "strong", "em", "del"}
KINDS = TEXT | {"table", "thead", "tbody", "tr", "th", "td"}


@with_node
def test_markdown_makes_elements_of_a_few_kinds_and_links_to_safe_addresses_only(tmp_path: Path) -> None:
    hostile = [
        "<img src=x onerror=alert(1)> <script>alert(1)</script>",
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) [e](/admin)",
        "[f](//evil)",
        "[g](https://ok.example/a_(b)) ![h](http://ok.example/p.png) <https://ok.example/x>",
        "[i](mailto:a@b.example) [j](\x01javascript:alert(1)) [k](java\tscript:alert(1)) [l](&#106;avascript:alert(1))",
        '# t\n> q\n- a\n  1. b\n\n```js" onload="x\n<b>\n```\n| a | b |\n|---|---|\n| <i> | `c` |\n***x*** ~~y~~',
        "---",
    ]
    code = f"""import {{ parse }} from "./markdown.js";
    const found = []; const walk = (node) => {{ if (typeof node !== "string") {{
      found.push([node.tag, node.attrs]); node.children.forEach(walk); }} }};
    {json.dumps(hostile)}.forEach((text) => parse(text).forEach(walk)); console.log(JSON.stringify(found));"""
    found: list[tuple[str, dict[str, str]]] = run(tmp_path, code)
    assert {tag for tag, _ in found} <= KINDS
    links = [attrs for tag, attrs in found if tag == "a"]
    assert [link["href"] for link in links] == [
        "https://ok.example/a_(b)", "http://ok.example/p.png", "https://ok.example/x", "mailto:a@b.example",
    ]  # fmt: skip
    assert all(link["rel"] == "noopener noreferrer" for link in links)
    assert {name for _, attrs in found for name in attrs} <= {"href", "rel", "target", "start", "data-language"}


@with_node
def test_markdown_takes_time_in_proportion_to_the_text(tmp_path: Path) -> None:
    parts = ["*", "[", "`", "_a ", "**a ", "> ", "https://", "- ", "`a``b", "~~a", "[a](", "|a", "\n", "- a\n\n", "1. "]
    code = f"""import {{ parse }} from "./markdown.js"; const from = performance.now();
    for (const part of {json.dumps(parts)}) parse(part.repeat(32000 / part.length));
    console.log(performance.now() - from);"""
    assert run(tmp_path, code) < 5_000


@with_node
def test_events_are_read_whole_wherever_the_stream_is_cut(tmp_path: Path) -> None:
    stream = ': keep-alive\n\nid: 1-1\nevent: answer\ndata: {"text":"é\\n"}\n\n'
    stream += "id: 1-2\r\nevent: a\r\ndata: x\r\ndata: y\r\n\r\n"
    code = f"""import {{ EventParser }} from "./events.js"; const stream = {json.dumps(stream)}; const all = new Set();
    for (let cut = 0; cut <= stream.length; cut += 1) {{ const parser = new EventParser();
      all.add(JSON.stringify([...parser.take(stream.slice(0, cut)), ...parser.take(stream.slice(cut))])); }}
    console.log(JSON.stringify([...all]));"""
    (found,) = run(tmp_path, code)
    assert json.loads(found) == [
        {"id": "1-1", "type": "answer", "data": '{"text":"é\\n"}'},
        {"id": "1-2", "type": "a", "data": "x\ny"},
    ]


@with_node
def test_a_restart_discards_the_void_text_and_nothing_else(tmp_path: Path) -> None:
    turn = after(
        tmp_path,
        [
            ("1-1", "claimed", {"model": "m"}),
            ("1-2", "thinking", {"text": "first"}),
            ("1-3", "answer", {"text": "I search. "}),
            ("1-4", "message", {"tool_calls": [{"name": "t"}], "prompt_tokens": 5, "completion_tokens": 2}),
            ("1-5", "tool.request", {"call_id": "c", "tool": "t", "args": {"q": 1}}),
            ("1-6", "tool.result", {"call_id": "c", "tool": "t", "args": {"q": 1}, "result": "r", "error": None,
                                    "duration_ms": 7}),
            ("1-7", "thinking", {"text": "void"}),
            ("1-8", "answer", {"text": "void"}),
            ("1-10", "answer", {"text": "void"}),
            ("2-1", "claimed", {"model": "m"}),
            ("2-2", "restarted", {"discard_after": "1-6"}),
            ("2-3", "answer", {"text": "valid"}),
            ("2-3", "answer", {"text": "repeated"}),
            ("1-9", "answer", {"text": "late"}),
        ],
    )  # fmt: skip
    assert turn["answer"] == "valid"
    assert [part["kind"] for part in turn["parts"]] == ["thinking", "said", "tool", "note"]
    assert turn["parts"][2]["call"]["duration_ms"] == 7
    assert turn["usage"] == {"prompt_tokens": 5, "completion_tokens": 2}


@with_node
def test_earlier_turns_come_on_demand_above_those_that_are_shown(tmp_path: Path) -> None:
    page = """
      globalThis.localStorage = { getItem: () => null, setItem() {} };
      class Element {
        children = []; parent = null; scrollTop = 0; clientHeight = 1; on = {};
        get isConnected() { return this.parent !== null; }
        get scrollHeight() { return 10 * this.children.length; }
        addEventListener(name, listener) { this.on[name] = listener; }
        setAttribute() {}
        #take(all) { for (const one of all) if (one instanceof Element) one.parent = this; return all; }
        append(...all) { this.children.push(...this.#take(all)); }
        prepend(...all) { this.children.unshift(...this.#take(all)); }
        replaceChildren(...all) { for (const c of this.children) c.parent = null; this.children = this.#take(all); }
        replaceWith(...all) {
          const { children } = this.parent;
          children.splice(children.indexOf(this), 1, ...this.parent.#take(all)); this.parent = null;
        }
        remove() { if (this.parent) this.replaceWith(); }
      }
      globalThis.document = { createElement: () => new Element() };
      const turns = Array.from({ length: 7 }, (_, n) => ({ query_id: `${n + 1}-0`, query: `q${n + 1}`, answer: "a" }));
      globalThis.call = async (method, path) => {
        if (path.startsWith("queries/")) return { state: "queued" };
        const before = new URL(path, "http://x").searchParams.get("before");
        const end = before ? parseInt(before) - 1 : turns.length, start = Math.max(0, end - 3);
        return { turns: turns.slice(start, end), earlier: start ? turns[start].query_id : null };
      };
    """
    code = """
      import "./page.js";
      const { Conversation } = await import("./conversation.js");
      const element = document.createElement(), none = () => {};
      const on = { onChange: none, onAccepted: none, onConnection: none };
      const talk = new Conversation(element, document.createElement(), on);
      const shown = () => element.children.map((one) => one.query ?? one.children[0]);
      const seen = [];
      await talk.open("s");
      seen.push(shown());
      for (let page = 0; page < 2; page += 1) { await element.children[0].on.click(); seen.push(shown()); }
      console.log(JSON.stringify({ seen, scrollTop: element.scrollTop }));
    """
    (tmp_path / "page.js").write_text(page, encoding="utf-8")
    view = """export class TurnView {
      constructor(turn) { this.turn = turn; this.element = document.createElement(); this.element.query = turn.query; }
      changed() {}
    }"""
    api = "export class ApiError extends Error {} export const request = null, call = (...a) => globalThis.call(...a);"
    found = run(tmp_path, code, turn_view=view, api=api)
    assert found["seen"] == [
        ["Earlier turns", "q5", "q6", "q7"],
        ["Earlier turns", "q2", "q3", "q4", "q5", "q6", "q7"],
        ["q1", "q2", "q3", "q4", "q5", "q6", "q7"],
    ]


@with_node
def test_what_a_persona_says_is_kept_apart_from_the_answer(tmp_path: Path) -> None:
    seat = {"persona": "skeptic", "round": 1}
    turn = after(
        tmp_path,
        [
            ("1-1", "persona.working", seat),
            ("1-2", "thinking", {"text": "hm", **seat}),
            ("1-3", "answer", {"text": "I doubt it.", **seat}),
            ("1-4", "persona.done", seat),
            ("1-5", "answer", {"text": "So."}),
            (
                "1-6",
                "completed",
                {"answer": "So.", "usage": {"prompt_tokens": 1, "completion_tokens": 2}, "model": "m"},
            ),
            ("1700000000000-0", "critique", {"score": 4, "feedback": "Good."}),
        ],
    )
    (persona,) = turn["parts"]
    assert (persona["persona"], persona["done"], persona["pieces"][0]["text"]) == ("skeptic", True, "I doubt it.")
    assert (turn["answer"], turn["state"], turn["critique"]["score"]) == ("So.", "completed", 4)


@with_node
def test_a_grade_has_its_colour_and_a_missing_one_has_none(tmp_path: Path) -> None:
    code = """import { colourOf, verdictOf } from "./judging.js"; import { age } from "./memory_panel.js";
    console.log(JSON.stringify([[5, 4, 3, 2, 1, null, undefined, "4", 4.5].map(colourOf),
      [null, true, false].map(verdictOf),
      [5, 90, 7200, 200000, 40000000, null].map(age)]));"""
    colours, verdicts, ages = run(tmp_path, code)
    assert colours == ["good", "good", "fair", "poor", "poor", "", "", "", ""]
    assert verdicts == ["as good as the other", "better than the other", "the other was better"]
    assert ages == ["5 s ago", "1 min ago", "2 h ago", "2 d ago", "1 y ago", "0 s ago"]


@with_node
def test_the_last_vote_is_the_one_that_is_shown(tmp_path: Path) -> None:
    turn = after(
        tmp_path,
        [
            ("1-1", "completed", {"answer": "So.", "model": "m"}),
            ("1700000000000-0", "reward", {"reward": 1.0, "sentiment": "positive", "stars": 5}),
            ("1700000000001-0", "pairwise", {"winner": "B", "reason": "longer"}),
            ("1700000000002-0", "reward", {"reward": -0.5, "sentiment": "negative", "stars": 2}),
        ],
    )
    assert (turn["reward"]["stars"], turn["pairwise"]["winner"], turn["state"]) == (2, "B", "completed")


# ── the link of `local2 run` ─────────────────────────────────────────────────────────────────────────────────


async def test_run_prints_a_link_that_works_once_only_on_a_terminal_and_never_a_key(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL2_API_KEY", "LOCAL2_ADMIN_KEY", "LOCAL2_API_URL"):
        monkeypatch.delenv(name, raising=False)
    async with serving(gateway_settings(redis_url, tmp_path)) as site:
        configured = ClientSettings(data_dir=tmp_path, api_url=site.url, admin_key=ADMIN_KEY)
        # the same key, as one that was generated
        (tmp_path / "admin.key").write_text(f"{ADMIN_KEY}\n", encoding="ascii")
        generated = ClientSettings(data_dir=tmp_path, api_url=site.url)
        for settings in (configured, generated):
            text = await welcome(settings, with_link=True)
            found = re.search(rf"console: {site.url}/#once=(\S+) \(works once", text)
            assert found is not None
            assert ADMIN_KEY not in text
            redeemed = await site.http.post("/keys/redeem", json={"token": found.group(1)})
            assert redeemed.status_code == 201
            assert f"console: {site.url}/\n" in await welcome(settings)
        (tmp_path / "admin.key").unlink()
        assert f"console: {site.url}/\n" in await welcome(generated, with_link=True)
