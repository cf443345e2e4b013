"""Schemas of tools for models: without references, in the requests of all backends."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.llm.factory import Backend, open_chat_model
from shared.llm.port import ChatRequest
from shared.llm.tool_schemas import without_references
from shared.testing.model_server import ScriptedModelServer

COLOUR = {"type": "string", "enum": ["red", "green"]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


def of(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def colour(reference: str = "#/$defs/colour", **beside: Any) -> dict[str, Any]:
    return {"c": {"$ref": reference, **beside}}


# (name, the schema, the same without references, the broken references)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("no reference", of({"c": COLOUR}), of({"c": COLOUR}), []),
    ("$defs", of(colour(), **{"$defs": {"colour": COLOUR}}), of({"c": COLOUR}), []),
    ("definitions", of(colour("#/definitions/colour"), definitions={"colour": COLOUR}), of({"c": COLOUR}), []),
    ("one definition refers to another", of(colour(), **{"$defs": {"colour": {"$ref": "#/$defs/x"}, "x": COLOUR}}),
     of({"c": COLOUR}), []),
    ("escapes of a pointer", of(colour("#/$defs/a~1b~0%20c"), **{"$defs": {"a/b~ c": COLOUR}}), of({"c": COLOUR}), []),
    ("a place in a list", of({"c": {"$ref": "#/properties/d/anyOf/1"}, "d": {"anyOf": [{}, COLOUR]}}),
     of({"c": COLOUR, "d": {"anyOf": [{}, COLOUR]}}), []),
    ("an anchor", of(colour("#colour"), **{"$defs": {"x": {"$anchor": "colour", **COLOUR}}}),
     of({"c": {"$anchor": "colour", **COLOUR}}), []),
    ("the schema's own name", of(colour("urn:me#/$defs/colour"), **{"$id": "urn:me", "$defs": {"colour": COLOUR}}),
     of({"c": COLOUR}, **{"$id": "urn:me"}), []),
    ("a description beside it", of(colour(description="mine"),
     **{"$defs": {"colour": {**COLOUR, "description": "theirs"}}}), of({"c": {**COLOUR, "description": "mine"}}), []),
    ("a condition beside it", of(colour(enum=["red"]), **{"$defs": {"colour": COLOUR}}),
     of({"c": {"allOf": [COLOUR, {"enum": ["red"]}]}}), []),
    ("a definition that is missing", of(colour("#/$defs/none")), of({"c": {}}), ["#/$defs/none"]),
    ("a pointer through a text", of(colour("#/type/x")), of({"c": {}}), ["#/type/x"]),
    ("a pointer to no schema", of(colour("#/type")), of({"c": {}}), ["#/type"]),
    ("another document", of(colour("https://example.com/colour.json")), of({"c": {}}),
     ["https://example.com/colour.json"]),
    ("named twice", of({"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}), of({"a": {}, "b": {}}),
     ["#/$defs/n"]),
    ("a schema that allows nothing", of(colour(), **{"$defs": {"colour": False}}), of({"c": {"not": {}}}), []),
    ("a list of itself", of({"n": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": NODE}}),
     of({"n": of({"next": of({"next": {}})})}), []),
    ("itself", {"$ref": "#"}, {}, []),
    ("an argument of this name", of({"$ref": {"type": "string"}, **colour()}, **{"$defs": {"colour": COLOUR}}),
     of({"$ref": {"type": "string"}, "c": COLOUR}), []),
    ("an argument named like a keyword", of({"enum": {"$ref": "#/$defs/colour"}}, **{"$defs": {"colour": COLOUR}}),
     of({"enum": COLOUR}), []),
    ("data that resembles one", of({**colour(), "d": {"default": {"$ref": "#/x"}}}, **{"$defs": {"colour": COLOUR}}),
     of({"c": COLOUR, "d": {"default": {"$ref": "#/x"}}}), []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "plain", "nowhere"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_references_are_replaced(schema: dict[str, Any], plain: dict[str, Any], nowhere: list[str]) -> None:
    before = json.dumps(schema)
    assert without_references(schema) == (plain, nowhere)
    assert json.dumps(schema) == before


def test_schema_that_doubles_itself_is_bounded() -> None:
    names = [f"n{n}" for n in range(40)]
    twice = {
        name: of({side: {"$ref": f"#/$defs/{after}"} for side in "ab"})
        for name, after in zip(names, [*names[1:], "n0"], strict=True)
    }
    plain, nowhere = without_references({"$ref": "#/$defs/n0", "$defs": twice})
    assert nowhere == []
    assert len(json.dumps(plain)) < 4 * len(json.dumps(twice))


NAMES = st.sampled_from(["$ref", "$defs", "a", "$id", "allOf", "properties"])
VALUES = st.none() | st.booleans() | st.sampled_from(["#", "#/$defs/a", "#/x", "#a", "x"])


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner)))
def test_any_schema_loses_its_references(value: Any) -> None:
    plain, _ = without_references({"properties": value, "$defs": {"a": value}})
    again, nowhere = without_references(plain)
    assert (again, nowhere) == (plain, [])


def test_schema_with_too_many_levels_allows_anything() -> None:
    deep: Any = COLOUR
    for _ in range(600):
        deep = of({"a": deep})
    assert without_references(deep) == ({"type": "object"}, ["more than 100 levels"])


def test_schema_without_references_accepts_the_same_values() -> None:
    schema = of({"n": {"$ref": "#/$defs/node"}, **colour()}, **{"$defs": {"node": NODE, "colour": COLOUR}})
    value = {"n": {"next": {"next": {"next": {"next": {}}}}}, "c": "red"}
    for one in (schema, without_references(schema)[0]):
        jsonschema.validate(value, one)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"c": "blue"}, one)


@pytest.mark.parametrize("backend", ["ollama", "openai", "google_genai"])
async def test_request_of_each_backend_has_no_reference(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = of({**colour(), "d": {"$ref": "#/$defs/gone"}}, **{"$defs": {"colour": COLOUR}})
    tool = {"type": "function", "function": {"name": "files__list", "description": "", "parameters": parameters}}
    async with ScriptedModelServer() as server:
        url = f"{server.url}/plain/v1" if backend == "openai" else server.url
        model = open_chat_model(backend, base_url=url, api_key="k")
        for tools in ([tool], [tool, {**tool, "function": {**tool["function"], "name": "other"}}]):
            asked = ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], tools=tools)
            _ = [delta async for delta in model.stream(asked)]
        await model.aclose()
        sent = json.dumps(server.requests[-1].body)
    assert "$ref" not in sent
    assert "$defs" not in sent
    assert '"d": {}' in sent
    # One log entry for each tool.
    assert capsys.readouterr().err.count("#/$defs/gone") == 2
