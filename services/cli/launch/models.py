"""Which model answers: the one of a model server that is there, or the demonstration model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.cli.launch.plan import MODEL_USERS
from services.cli.settings import ModelWish
from shared.llm.ollama_admin import OllamaAdmin, PullProgress, ollama_url
from shared.llm.port import ModelError, ModelUnavailable
from shared.participant.settings import own_prefix


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """demo: the demonstration model is to be started. notes: sentences for the terminal."""

    demo: bool = False
    notes: tuple[str, ...] = ()


class Progress(Protocol):
    """Shows how far a download is."""

    def __call__(self, model: str, part: PullProgress) -> None: ...


async def choose_model(
    wish: ModelWish, models: Sequence[str], say: Callable[[str], None], progress: Progress, judge: str | None = None
) -> ModelChoice:
    """Uses the backend that is configured; with Ollama it pulls what is missing, without one the demo is chosen.

    judge: a model of Ollama that is not waited for: without it everything works but grading.
    """
    if wish.backend != "ollama":
        return ModelChoice(notes=(f"model {wish.model} from the {wish.backend} backend",))
    url = ollama_url(wish.ollama_host)
    admin = OllamaAdmin(wish.ollama_host, wish.key, wish.ca_file)
    try:
        there = await admin.models()
    except ModelUnavailable:
        return ModelChoice(demo=True, notes=(f"Ollama does not answer at {url}",))
    except ModelError as exc:
        return ModelChoice(notes=(str(exc),))
    else:
        notes = []
        for model in dict.fromkeys(models):
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
        if judge is not None and not has_model(there, judge):
            notes.append(f"no judge: answers are graded once Ollama has {judge}; get it with: ollama pull {judge}")
        return ModelChoice(notes=tuple(notes))
    finally:
        await admin.aclose()


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
