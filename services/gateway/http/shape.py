"""The base of the answers' types, which describe the HTTP interface.

Handlers build plain JSON values, and no type is built or checked for an answer: the types are for the OpenAPI document,
and the tests' HTTP client compares every answer with them. A field without a default is always there; one with a
default may be left out.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """A JSON object in an answer. Clients ignore fields that they do not know: a later version may add some.

    What checks a shape is not built before somebody needs it: no answer does.
    """

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)
