"""Writes the types of the console (services/console/src/api/schema.ts) from the gateway's OpenAPI document.

`python deploy/console_types.py [--check]`: with it nothing is written, and the exit code says whether the file is as
it would be written. Needs Node and the console's packages (`make console`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONSOLE = ROOT / "services" / "console"
TARGET = CONSOLE / "src" / "api" / "schema.ts"
# Words for people: the types do not need them, and a change of one is none of the types.
_WORDS = ("title", "description", "example", "examples")


def shapes() -> dict[str, Any]:
    """The document's shapes without its routes; what an event carries is the shape itself, not a text."""
    # makes the application, which takes a moment: not for `--help`
    from services.gateway.app import create_app
    from services.gateway.description import describe
    from services.gateway.http.gateway import Gateway
    from services.gateway.openai import shapes as openai
    from services.gateway.settings import GatewaySettings

    document = describe(create_app(Gateway(GatewaySettings(redis_url="redis://127.0.0.1:9"))))
    found = {
        name: _plain(shape)
        for name, shape in document["components"]["schemas"].items()
        # the console asks in our own words
        if getattr(vars(openai).get(name), "__module__", "") != openai.__name__
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "LoCAL2", "version": "1"},
        "paths": {},
        "components": {"schemas": {name: shape for name, shape in found.items() if _closed(shape, found)}},
    }


def _plain(shape: Any) -> Any:
    if isinstance(shape, list):
        return [_plain(part) for part in shape]
    if not isinstance(shape, dict):
        return shape
    if "contentSchema" in shape:
        return _plain(shape["contentSchema"])
    # a property may have one of these names: then it is a shape
    return {k: _plain(v) for k, v in shape.items() if k not in _WORDS or (isinstance(v, dict) and k != "example")}


def _closed(shape: Any, known: dict[str, Any]) -> bool:
    """Whether everything that it refers to is there."""
    if isinstance(shape, list):
        return all(_closed(part, known) for part in shape)
    if not isinstance(shape, dict):
        return True
    place = shape.get("$ref")
    return (not isinstance(place, str) or place.rpartition("/")[2] in known) and _closed(list(shape.values()), known)


def generated() -> str:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "openapi.json", Path(folder) / "schema.ts"
        source.write_text(json.dumps(shapes()), encoding="utf-8")
        program = CONSOLE / "node_modules" / "openapi-typescript" / "bin" / "cli.js"
        subprocess.run(["node", program, source, "-o", made], check=True, stdout=subprocess.DEVNULL, cwd=CONSOLE)
        return made.read_text(encoding="utf-8")


def main(arguments: list[str]) -> int:
    text = generated()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is not what the API says: make console-types", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
