"""The answers of the HTTP interface as types, for its description.

Handlers build plain JSON values, and nothing here is run on the way of an answer: the types say in the OpenAPI document
what comes, and the tests' HTTP client compares every answer with them. A field without a default is always there; one
with a default may be left out.
"""

from services.gateway.shapes.shape import Shape

__all__ = ["Shape"]
