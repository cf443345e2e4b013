"""What every shape of an answer is made from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """A JSON object in an answer. Clients ignore fields that they do not know: a later version may add some.

    What checks a shape is not built before somebody needs it: no answer does.
    """

    model_config = ConfigDict(protected_namespaces=(), defer_build=True)
