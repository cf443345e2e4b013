"""What the browser's checks stand on: a stack of its own with the scripted model, and a browser of somebody."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from stories_stack import SHADOW, clean_environment, free_port, page_server, program, wait_until_ready  # noqa: E402

from shared.testing.script import STORIES  # noqa: E402

AXE = ROOT / "services" / "console" / "node_modules" / "axe-core" / "axe.min.js"
BUILT = ROOT / "services" / "console" / "dist" / "index.html"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--no-first-run"]  # fmt: skip
WIDTHS = (390, 1024, 1400)

HOSTILE = "<img src=x onerror=\"window.hit=1\"><script>window.hit=2</script> [a](javascript:window.hit=3) " \
    "![p](http://127.0.0.1:9/leak.png) <style>body{display:none}</style><svg onload=window.hit=4>"  # fmt: skip
RICH = f"""# A heading

A formula \\(a^2\\,+\\,b^2 = c^2\\) and one alone:

$$\\int_0^1 x\\,dx = \\frac{{1}}{{2}}$$

It costs $5 and $6. Words_with_underscores_inside stay.

```python
def greet(name: str) -> str:
    return f"Hello {{name}}"  # a comment
```

| Name | Pipe | Number |
|---|---|---:|
| one | `a \\| b` | 1 |
| two | c \\| d | 22 |

- [x] done
- [ ] to do

A claim.[^1]

مرحبا بالعالم، هذا نص من اليمين.

{HOSTILE}

[^1]: Where it stands.
"""
LONG = "\n\n".join(
    f"## Part {n}\n\nSome words of part {n}, which go on for a while and say nothing that matters much.\n\n"
    f"- point one of {n}\n- point two\n\n```python\nfor i in range({n}):\n    print(i, 'a line of code')\n```"
    for n in range(1, 330)
)
# The models of the server; the default model sees images.
MODELS = {
    "gemma4:e4b": ["tools", "thinking", "vision"],
    "ggozad/prometheus2": [],
    "nomic-embed-text": ["embedding"],
}
RULES: list[dict[str, Any]] = [
    {"when": {"user": "^show everything"}, "respond": {"thinking": "I show it all.", "text": RICH}},
    {"when": {"user": "^a long one"}, "respond": {"text": LONG, "pace": 0.0015}},
    {
        "when": {"user": "^slowly"},
        "respond": {"text": "one two three four five six seven eight nine ten " * 12, "pace": 0.1},
    },
    {"when": {"user": "^say hostile"}, "respond": {"text": HOSTILE}},
]


class NotRun(Exception):
    """What this machine lacks."""


@dataclass
class Stack:
    """redis: the socket of its Redis."""

    url: str
    key: str
    redis: Path

    def api(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=60, trust_env=False
        )


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Stack]:
    """A whole stack with the scripted model, a page for web_fetch, and a second respondent."""
    rules = folder / "rules.json"
    stories = yaml.safe_load(STORIES.read_text(encoding="utf-8"))["rules"]
    judges = [rule for rule in stories if str(rule.get("name", "")).startswith("judge")]
    others = [rule for rule in stories if rule not in judges]
    rules.write_text(json.dumps({"models": MODELS, "rules": [*judges, *RULES, *others]}), encoding="utf-8")
    with page_server() as page, (folder / "stack.log").open("ab") as out:
        env = clean_environment(folder)
        model = [sys.executable, "-m", "shared.testing.model_server", "--port", "0", "--rules", str(rules)]
        with program(model, env, out) as server:
            assert server.stdout is not None
            model_url = server.stdout.readline().split()[-1]
            env |= {
                "OLLAMA_HOST": model_url,
                "LOCAL2_API_PORT": str(free_port()),
                # nobody reads an answer here before asking on
                "LOCAL2_YIELD_REST": "0",
                "LOCAL2_ADMIN_KEY": "the-browser-s-admin-key",
                "LOCAL2_WEB_SEARCH_PROVIDER": "mock",
                "LOCAL2_WEB_SEARCH_MOCK_PAGE_URL": page,
                "LOCAL2_WEB_FETCH_ALLOWED_PRIVATE_HOSTS": json.dumps([page.split("/")[2]]),
            }
            with program([sys.executable, "-m", "services.cli", "run", "--headless", *SHADOW], env, out) as stack:
                url = f"http://127.0.0.1:{env['LOCAL2_API_PORT']}"
                wait_until_ready(url, stack)
                yield Stack(url, env["LOCAL2_ADMIN_KEY"], folder / "data" / "redis" / "redis.sock")


@dataclass
class Visit:
    """A browser of somebody, with everything that its pages complain of."""

    stack: Stack
    browser: Any
    shots: Path
    context: Any = None
    complaints: list[str] = field(default_factory=list)

    def open(self, width: int = 1400, height: int = 900, dark: bool = False, path: str | None = None) -> Any:
        """A page in this browser, signed in by a one-time link unless a path is given."""
        if self.context is None:
            scheme = "dark" if dark else "light"
            self.context = self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            self.context.set_default_timeout(20_000)
            self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=self.stack.url)
        page = self.context.new_page()
        page.on("console", lambda said: self._heard(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda asked: self._asked(asked.url))
        if path is None:
            with self.stack.api() as http:
                path = http.post("/keys/link").json()["path"]
        page.goto(self.stack.url + path)
        page.locator("#question, #key").wait_for()
        return page

    def _heard(self, kind: str, text: str) -> None:
        # a server that is away is what some checks are about; the page says it to its user
        if kind == "error" and "Failed to load resource" not in text:
            self.complaints.append(f"console: {text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self.stack.url, "blob:")):
            self.complaints.append(f"asked elsewhere: {url}")

    def shot(self, page: Any, name: str) -> None:
        page.screenshot(path=str(self.shots / f"{name}.png"))

    def axe(self, page: Any) -> None:
        """What axe finds that is serious or critical is a complaint. It is put into the page beside its policy."""
        session = self.context.new_cdp_session(page)
        session.send("Runtime.evaluate", {"expression": AXE.read_text(encoding="utf-8")})
        found = session.send(
            "Runtime.evaluate",
            {"expression": "axe.run().then(r => JSON.stringify(r.violations.filter(v => ['serious', 'critical']"
             ".includes(v.impact)).map(v => v.id + ': ' + v.nodes.slice(0, 3).map(n => n.target + ' ' +"
             " n.failureSummary).join(' | '))))", "awaitPromise": True},
        )  # fmt: skip
        session.detach()
        self.complaints += [f"axe: {one}" for one in json.loads(found["result"]["value"])]


def ask(page: Any, words: str) -> None:
    page.fill("#question", words)
    page.press("#question", "Enter")


def until(page: Any, fact: str, within: float = 20, every: float = 50) -> None:
    """Waits until an expression is true in the page, whose policy forbids to evaluate texts there. every: in ms."""
    deadline = time.monotonic() + within
    while not page.evaluate(f"() => {fact}"):
        assert time.monotonic() < deadline, fact
        page.wait_for_timeout(every)


def answered(page: Any, words: str, within: float = 60) -> Any:
    """The newest turn, once it is over and has these words."""
    turn = page.locator("article.turn").last
    turn.locator(".prose", has_text=words).first.wait_for(timeout=within * 1000)
    until(page, "!document.querySelector('article.turn.running')", within)
    return turn
