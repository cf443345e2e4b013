"""OpenAI's embeddings, by the embedding model of memory."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import Field, WithJsonSchema

from services.gateway.http.auth import UserDep
from services.gateway.http.body import JsonRoute
from services.gateway.http.errors import ApiError
from services.gateway.http.gateway import GatewayDep
from services.gateway.http.json_response import reply
from services.gateway.http.participant_rpc import operate
from services.gateway.http.schemas import spec
from services.gateway.openai.chat_body import DEFAULT_MODEL, Wire, bad
from services.gateway.openai.shapes import EmbeddingList

router = APIRouter(route_class=JsonRoute, prefix="/v1", tags=["openai"])

# As many as OpenAI takes; memory is given so many at once.
MOST_INPUTS = 2_048
_BATCH, _BATCH_CHARS = 64, 200_000
# Where nobody counts: characters of a token, on average.
_CHARS = 4

_EXAMPLE: dict[str, Any] = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.6, 0.8]}],
    "model": "nomic-embed-text",
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}


class EmbeddingsBody(Wire):
    model_config = Wire.model_config | {
        "json_schema_extra": {"example": {"model": "local2", "input": ["What is the capital of France?"]}}
    }

    model: str | None = Field(default=DEFAULT_MODEL, max_length=200, description="local2, or memory's own by its name")
    # what else stands in the list is refused by a sentence of its own
    input: str | Annotated[list[Any], WithJsonSchema({"type": "array", "items": {"type": "string"}})] = Field(
        description="A text, or a list of texts"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def texts(self) -> list[str]:
        """Raises ApiError 400."""
        if self.dimensions is not None:
            raise bad(
                "dimensions: vectors come in the length that the embedding model has; leave it out", "unsupported"
            )
        given = [self.input] if isinstance(self.input, str) else self.input
        if not 0 < len(given) <= MOST_INPUTS:
            raise bad(f"input: from 1 to {MOST_INPUTS} texts are expected")
        for place, text in enumerate(given):
            if not isinstance(text, str):
                raise bad(f"input.{place}: a text is expected; tokens mean nothing to another model", "unsupported")
            if not text.strip():
                raise bad(f"input.{place}: must not be empty")
        return given


def batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """As many as memory takes at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and (len(batch) == _BATCH or size + len(text) > _BATCH_CHARS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    yield batch


def floats(packed: str) -> list[float]:
    raw = b64decode(packed)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


@router.post(
    "/embeddings",
    summary="Vectors of texts, by the embedding model that memory uses",
    responses=spec("One vector a text, of length one", EmbeddingList, _EXAMPLE, 400, 404, 413, 415, 503),
)
async def create_embeddings(body: EmbeddingsBody, gateway: GatewayDep, user: UserDep) -> Response:
    texts, name = body.texts(), body.model or DEFAULT_MODEL
    vectors: list[str] = []
    model = ""
    for batch in batches(texts):
        try:
            found = await operate(gateway, "memory", user.user_id, op="embed", texts=batch)
        except ApiError as exc:
            # on OpenAI's routes a wrong value is a bad request
            raise bad(f"input: {exc.message}") if exc.status_code == 422 else exc from exc
        model = found["model"]
        if name not in (DEFAULT_MODEL, model, model.partition(":")[0]):
            raise ApiError(404, "model_not_found", f"{name!r} does not embed here; there are: {DEFAULT_MODEL}, {model}")
        vectors += found["vectors"]
    tokens = sum(-(-len(text) // _CHARS) for text in texts)
    encoded = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": place, "embedding": vector if encoded else floats(vector)}
        for place, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return reply({"object": "list", "data": data, "model": model, "usage": usage})
