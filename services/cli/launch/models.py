"""Which model answers: the one of a model server that is there, or the demonstration model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from services.cli.launch.plan import MODEL_USERS
from services.cli.settings import ModelConfig
from services.cli.words import typed
from shared.llm.address import shown
from shared.llm.ollama_admin import OllamaAdmin, PullProgress
from shared.llm.port import ModelError, ModelUnavailable
from shared.participant.settings import own_prefix

# Between two looks whether an Ollama has come that was not there at the start, in seconds.
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """demo: the demonstration model is to be started. away: Ollama is waited for. notes: sentences for the terminal."""

    demo: bool = False
    away: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What Ollama is to have.

    models: those that are pulled when they are missing. judge: one that is not, because everything but grading works
    without it. named: somebody has said which server or model is to answer; no other one ever answers then.
    """

    models: Sequence[str]
    judge: str | None = None
    named: bool = False


class Progress(Protocol):
    """Shows how far a download is."""

    def __call__(self, model: str, part: PullProgress) -> None: ...


async def choose_model(
    config: ModelConfig, wanted: Wanted, say: Callable[[str], None], progress: Progress
) -> ModelChoice:
    """Uses the backend that is configured; with Ollama it pulls what is missing. Without one the demonstration model is
    chosen, unless a server or a model was named: then that is waited for."""
    if config.backend != "ollama":
        return ModelChoice(notes=(f"model {config.model} from the {config.backend} backend",))
    url = shown(config.address)
    async with aclosing(OllamaAdmin(config.address, config.key, config.ca_file)) as admin:
        try:
            there = await admin.models()
        except ModelError as exc:
            if isinstance(exc, ModelUnavailable) and not wanted.named:
                return ModelChoice(demo=True, notes=(f"Ollama does not answer at {url}",))
            return ModelChoice(away=True, notes=(f"{exc}; waiting for it",))
        return ModelChoice(notes=tuple(await _provided(admin, url, there, wanted, say, progress)))


async def late_model(
    config: ModelConfig, wanted: Wanted, say: Callable[[str], None], progress: Progress, pause: float = _LOOK_SECONDS
) -> None:
    """Waits until Ollama answers, and pulls what it lacks; the participants see for themselves that it is there."""
    async with aclosing(OllamaAdmin(config.address, config.key, config.ca_file)) as admin:
        there = await _when_there(admin, pause)
        say(f"Ollama answers now at {shown(config.address)}")
        for note in await _provided(admin, shown(config.address), there, wanted, say, progress):
            say(note)


async def instead_of_demo(config: ModelConfig, say: Callable[[str], None], pause: float = _LOOK_SECONDS) -> None:
    """Says, once Ollama answers, how to use it instead of the demonstration model."""
    async with aclosing(OllamaAdmin(config.address, config.key, config.ca_file)) as admin:
        await _when_there(admin, pause)
    url = shown(config.address)
    say(f"Ollama answers now at {url}; to use it instead of the demonstration model: Ctrl-C, then {typed('run')}")


async def _when_there(admin: OllamaAdmin, pause: float) -> list[str]:
    while True:
        with suppress(ModelError):
            return await admin.models()
        await asyncio.sleep(pause)


async def _provided(
    admin: OllamaAdmin, url: str, there: Sequence[str], wanted: Wanted, say: Callable[[str], None], progress: Progress
) -> list[str]:
    notes = []
    for model in dict.fromkeys(wanted.models):
        if has_model(there, model):
            notes.append(f"model {model} from Ollama at {url}")
            continue
        say(f"Ollama does not have {model} yet: pulling it")
        try:
            async for part in admin.pull(model):
                progress(model, part)
        except ModelError as exc:
            notes.append(f"{model} could not be pulled ({exc}); get it with: ollama pull {model}")
        else:
            notes.append(f"model {model} from Ollama at {url} (pulled now)")
    judge = wanted.judge
    if judge is not None and not has_model(there, judge):
        notes.append(f"no judge: answers are graded once Ollama has {judge}; get it with: ollama pull {judge}")
    return notes


def has_model(there: Sequence[str], wanted: str) -> bool:
    """Ollama's names have tags; `latest` is the one that may be left out."""
    return wanted in there or f"{wanted}:latest" in there


def demo_env(url: str, model: str, users: Sequence[str] = MODEL_USERS) -> dict[str, str]:
    """What makes the participants `users` use the demonstration model, whatever else their environment says."""
    said = {"OLLAMA_HOST": url, "BACKEND": "ollama", "MODEL": model}
    return {
        "OLLAMA_HOST": url,
        **{f"LOCAL2_{name}": value for name, value in said.items()},
        **{f"{own_prefix(user)}{name}": value for user in users for name, value in said.items()},
        # as a judge it is hardly ever to be understood, and asking it again costs the answers their time
        "LOCAL2_CRITIC_ATTEMPTS": "1",
        "LOCAL2_DEMO": "1",
    }
