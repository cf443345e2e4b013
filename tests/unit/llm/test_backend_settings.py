"""Which key goes to which server, and from which variable each setting of a model server comes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.memory.settings import MemorySettings
from shared.errors import SettingsError
from shared.llm.settings import BackendSettings

MAIN, JUDGE, OPENAI, GEMINI, OLLAMA = "main-key", "judges-key", "openais-key", "geminis-key", "ollamas-key"
CLASSES: dict[str, type[BackendSettings]] = {
    "generator": GeneratorSettings,
    "respondent-b": GeneratorSettings,
    "critic": CriticSettings,
    "memory": MemorySettings,
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith(("LOCAL2_", "OLLAMA_", "OPENAI_", "GEMINI_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def said(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("participant", CLASSES)
@pytest.mark.parametrize(
    ("backend", "key"), [("ollama", OLLAMA), ("openai", OPENAI), ("google_genai", GEMINI)], ids=lambda value: value
)
def test_each_backend_gets_the_key_of_its_own_name(
    participant: str, backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = CLASSES[participant].load
    said(monkeypatch, LOCAL2_BACKEND=backend)
    others = {"ollama": "OLLAMA_API_KEY", "openai": "OPENAI_API_KEY", "google_genai": "GEMINI_API_KEY"}
    values = {"ollama": OLLAMA, "openai": OPENAI, "google_genai": GEMINI}
    own = others.pop(backend)
    said(monkeypatch, **{name: values[other] for other, name in others.items()})
    assert load(participant).key is None
    said(monkeypatch, **{own: key})
    assert load(participant).key == key


@pytest.mark.parametrize("participant", CLASSES)
def test_ollama_is_sent_no_key_that_is_not_named_for_it(participant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, OPENAI_API_KEY=OPENAI, GEMINI_API_KEY=GEMINI, LOCAL2_BACKEND_API_KEY=MAIN)
    assert CLASSES[participant].load(participant).key is None


@pytest.mark.parametrize("participant", CLASSES)
def test_a_participants_own_name_goes_before_every_general_one(
    participant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = f"LOCAL2_{participant.upper().replace('-', '_')}_"
    said(monkeypatch, OLLAMA_HOST="http://c", LOCAL2_OLLAMA_HOST="http://b", **{f"{prefix}OLLAMA_HOST": "http://a"})
    said(monkeypatch, OLLAMA_API_KEY="c", LOCAL2_OLLAMA_API_KEY="b", **{f"{prefix}OLLAMA_API_KEY": "a"})
    for expected in ("a", "b", "c"):
        settings = CLASSES[participant].load(participant)
        assert (settings.ollama_host, settings.key) == (f"http://{expected}", expected)
        for name in {"a": [f"{prefix}OLLAMA_HOST", f"{prefix}OLLAMA_API_KEY"],
                     "b": ["LOCAL2_OLLAMA_HOST", "LOCAL2_OLLAMA_API_KEY"]}.get(expected, []):  # fmt: skip
            # empty is as if it were not set: so compose files pass on what nobody has said
            monkeypatch.setenv(name, "")


def test_the_judge_has_an_address_and_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, LOCAL2_BACKEND="openai", LOCAL2_BASE_URL="http://main:8000/v1", LOCAL2_BACKEND_API_KEY=MAIN)
    assert CriticSettings.load("critic").key == MAIN
    said(monkeypatch, LOCAL2_CRITIC_BASE_URL="http://judge:8000/v1")
    assert (CriticSettings.load("critic").address, CriticSettings.load("critic").key) == ("http://judge:8000/v1", None)
    assert GeneratorSettings.load("generator").key == MAIN
    said(monkeypatch, LOCAL2_CRITIC_BACKEND_API_KEY=JUDGE)
    assert CriticSettings.load("critic").key == JUDGE
    # the same server by another path is the same server
    said(monkeypatch, LOCAL2_CRITIC_BACKEND_API_KEY="", LOCAL2_CRITIC_BASE_URL="http://main:8000/judge/v1")
    assert CriticSettings.load("critic").key == MAIN


def test_a_key_for_all_stays_with_the_backend_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    said(monkeypatch, LOCAL2_BACKEND="openai", LOCAL2_BACKEND_API_KEY=MAIN, LOCAL2_CRITIC_BACKEND="google_genai")
    assert CriticSettings.load("critic").key is None
    Path("local2.yaml").write_text("memory: {base_url: 'https://embeddings.example.com/v1'}\n")
    assert MemorySettings.load("memory").key is None
    # where no server is named to all, a key for all is for each
    monkeypatch.delenv("LOCAL2_BACKEND")
    said(monkeypatch, LOCAL2_MEMORY_BACKEND="openai")
    assert MemorySettings.load("memory").key == MAIN


def test_a_line_end_after_a_key_is_not_of_it_and_what_cannot_be_sent_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said(monkeypatch, LOCAL2_BACKEND="openai", OPENAI_API_KEY=f"{OPENAI}\n")
    assert GeneratorSettings.load("generator").key == OPENAI
    for wrong in ("schlüssel", "a\nb"):
        said(monkeypatch, OPENAI_API_KEY=wrong)
        with pytest.raises(SettingsError, match=r"openai_api_key \(OPENAI_API_KEY\): a key has printable") as caught:
            GeneratorSettings.load("generator")
        assert wrong not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("OLLAMA_HOST", "http://gpu:99999", r"ollama_host \(OLLAMA_HOST\): the port must be a number"),
        ("LOCAL2_BASE_URL", "gpu:port/v1", r"base_url \(LOCAL2_BASE_URL\): the port must be a number"),
        ("LOCAL2_CRITIC_BASE_URL", "http//gpu", r"base_url \(LOCAL2_CRITIC_BASE_URL\): an address begins with"),
        ("LOCAL2_CA_FILE", "nowhere.pem", r"ca_file \(LOCAL2_CA_FILE\): nowhere.pem cannot be used: No such file"),
        ("LOCAL2_CRITIC_CA_FILE", "text.pem", r"ca_file \(LOCAL2_CRITIC_CA_FILE\): .* no certificate in PEM form"),
    ],
)
def test_a_malformed_address_or_file_is_a_sentence_at_the_start(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.pem").write_text("hello")
    said(monkeypatch, **{name: value})
    with pytest.raises(SettingsError, match=f"settings of critic: {told}"):
        CriticSettings.load("critic")
