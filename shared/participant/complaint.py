"""New values of run-time settings against the schema that a participant gave of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from shared.contracts import persona_key


def spelled(schema: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values with names of a closed list written as they are there: case, spaces and underscores make no
    difference."""
    found = dict(values)
    for name, value in values.items():
        known = schema.get("properties", {}).get(name, {}).get("items", {}).get("enum")
        if known and isinstance(value, list):
            names = {persona_key(one): one for one in known if isinstance(one, str)}
            found[name] = [names.get(persona_key(one), one) if isinstance(one, str) else one for one in value]
    return found


def complaint(schema: dict[str, Any], values: dict[str, Any]) -> str | None:
    """What is wrong with new values, as a sentence that names the setting; None when nothing is."""
    known = schema.get("properties", {})
    unknown = sorted(set(values) - set(known))
    if unknown:
        return f"{unknown[0][:100]}: not a run-time setting; these are: {', '.join(sorted(known))}"
    # needed once in a while, and with what it imports two megabytes
    import jsonschema

    validators: Any = jsonschema.validators
    validator = validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})
    error = jsonschema.exceptions.best_match(validator(schema).iter_errors(values))
    if error is None:
        return None
    place = ".".join(str(part) for part in error.absolute_path)
    shown = repr(error.instance)
    if isinstance(error.instance, float) and not math.isfinite(error.instance):
        return f"{place}: must be a finite number"
    reason = error.message if len(shown) <= 100 else error.message.replace(shown, "the value")
    return f"{place}: {reason}"[:500]


def _pattern(_validator: Any, pattern: str, value: Any, schema: dict[str, Any]) -> Iterator[Exception]:
    """As the participant reads it: `$` at the end is the end, and not what stands before a last line break, too."""
    import jsonschema

    if isinstance(value, str) and not re.search(re.sub(r"(?<!\\)\$$", r"\\Z", pattern), value):
        meant = f" ({schema['description']})" if "description" in schema else ""
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}{meant}")
