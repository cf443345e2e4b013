"""The code that a client reads for each error of a generation."""

from __future__ import annotations

import pytest

from services.generator.attachments import AttachmentMissing, AttachmentsUnavailable
from services.generator.ending import Failure, failure_of
from services.generator.identities import UnknownPersona
from services.generator.response_constraints import UnusableForm
from shared.llm.port import (
    ContextOverflow,
    EmptyAnswer,
    ModelError,
    ModelMissing,
    ModelOverloaded,
    ModelRejected,
    ModelUnavailable,
    StreamInterrupted,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnknownPersona("who?"), "unknown_persona"),
        (UnusableForm("no schema"), "bad_request"),
        (AttachmentMissing("f"), "attachment_missing"),
        (AttachmentsUnavailable("away"), "memory_unavailable"),
        (ModelMissing("no model"), "model_missing"),
        (ModelRejected("no"), "model_rejected"),
        (ContextOverflow("too long"), "context_overflow"),
        (ModelUnavailable("away"), "model_unavailable"),
        (ModelOverloaded("busy"), "model_error"),
        (EmptyAnswer("nothing"), "model_error"),
        (StreamInterrupted("cut"), "model_error"),
        (ModelError("odd"), "model_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ModelError) else "",
)
def test_error_of_a_generation_has_its_code(error: ModelError, code: str) -> None:
    assert failure_of(error) == Failure(code, str(error))
