"""Settings: defaults, file, environment, run-time updates, in this order."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import AliasChoices, Field, SecretStr

from shared.errors import SettingsError
from shared.participant.settings import Settings


class Example(Settings):
    runtime: ClassVar[frozenset[str]] = Settings.runtime | {"timeout", "hosts", "key"}

    timeout: float = Field(default=10, gt=0, description="Seconds")
    hosts: list[str] = Field(default=[], description="Allowed hosts")
    url: str = Field(default="http://localhost", validation_alias=AliasChoices("url", "EXAMPLE_URL"))
    key: SecretStr | None = Field(default=None, validation_alias=AliasChoices("key", "EXAMPLE_KEY"))


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [*os.environ]:
        if name.startswith(("LOCAL2_", "EXAMPLE_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(text: str) -> None:
    Path("local2.yaml").write_text(text, encoding="utf-8")


def test_defaults_apply_when_nothing_is_said() -> None:
    settings = Example.load("example")
    assert (settings.timeout, settings.redis_url) == (10, "redis://127.0.0.1:6379/0")


def test_each_layer_overrides_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    write("defaults: {timeout: 1, heartbeat: 2}\nexample: {timeout: 2}\nother: {timeout: 9}\n")
    assert Example.load("example").timeout == 2
    assert Example.load("example").heartbeat == 2
    monkeypatch.setenv("LOCAL2_TIMEOUT", "3")
    assert Example.load("example").timeout == 3
    monkeypatch.setenv("LOCAL2_EXAMPLE_TIMEOUT", "4")
    assert Example.load("example").timeout == 4
    assert Example.load("other").timeout == 3
    assert Example.load("example", {"timeout": 5}).timeout == 5


def test_a_shared_setting_is_heard_by_every_participant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_REDIS_URL", "redis://elsewhere")
    assert Example.load("example").redis_url == "redis://elsewhere"
    assert Settings.load("another").redis_url == "redis://elsewhere"


def test_a_participants_dash_is_an_underscore_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_RESPONDENT_B_TIMEOUT", "7")
    assert Example.load("respondent-b").timeout == 7


def test_established_names_of_other_programs_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_URL", "http://there")
    assert Example.load("example").url == "http://there"


def test_lists_come_as_json_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_HOSTS", '["a", "b"]')
    assert Example.load("example").hosts == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("LOCAL2_TIMEOUT", "-1", "timeout"), ("LOCAL2_TIMEOUT", "soon", "timeout"), ("LOCAL2_HOSTS", "[a", "hosts")],
)
def test_a_wrong_value_names_the_setting(name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        Example.load("example")


def test_a_secret_is_never_in_an_error_or_among_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "hunter2")
    monkeypatch.setenv("LOCAL2_TIMEOUT", "hunter3")
    with pytest.raises(SettingsError) as caught:
        Example.load("example")
    assert "hunter" not in str(caught.value)
    monkeypatch.delenv("LOCAL2_TIMEOUT")
    settings = Example.load("example")
    assert settings.key is not None
    assert settings.key.get_secret_value() == "hunter2"
    assert "key" not in settings.runtime_values()
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize("text", ["[1, 2]", "example: 7", "a: [", "just text"])
def test_a_malformed_file_is_an_error_that_names_it(text: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=r"local2\.yaml"):
        Example.load("example")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"example: {url: caf\xe9}", "not UTF-8"),
        (b"a: " + b"[" * 3_000 + b"]" * 3_000, "nested too deeply"),
        # of two sections of one name YAML would keep the last
        (b"example: {timeout: 1}\nexample: {url: x}", "example stands there twice"),
        (b"example: {timeout: 1, timeout: 2}", "timeout stands there twice"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_says_why(content: bytes, why: str) -> None:
    Path("local2.yaml").write_bytes(content)
    with pytest.raises(SettingsError, match=rf"local2\.yaml.*{why}"):
        Example.load("example")


def test_what_sections_have_in_common_may_be_written_once() -> None:
    write("other: &both {hosts: [a], timeout: 3}\nexample: {<<: *both, timeout: 9}\n")
    settings = Example.load("example")
    assert (settings.hosts, settings.timeout) == (["a"], 9)


def test_a_named_file_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_CONFIG", "nowhere.yaml")
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        Example.load("example")


def test_an_update_is_validated_and_leaves_the_old_settings_as_they_are() -> None:
    settings = Example.load("example")
    changed = settings.update_settings({"timeout": 3})
    assert (settings.timeout, changed.timeout) == (10, 3)
    with pytest.raises(SettingsError, match="timeout"):
        settings.update_settings({"timeout": 0})


@pytest.mark.parametrize("values", [{"redis_url": "x"}, {"nosuch": 1}, {"timeout": 1, "url": "x"}])
def test_only_run_time_settings_can_be_updated(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="not a run-time setting"):
        Example.load("example").update_settings(values)


def test_an_update_keeps_what_came_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_KEY", "hunter2")
    monkeypatch.setenv("EXAMPLE_URL", "http://there")
    changed = Example.load("example").update_settings({"timeout": 3})
    assert changed.url == "http://there"
    assert changed.key is not None
    assert changed.key.get_secret_value() == "hunter2"


def test_the_schema_describes_the_run_time_settings_only() -> None:
    schema = Example.get_settings_schema()
    assert set(schema["properties"]) == set(Example.runtime)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["timeout"]["exclusiveMinimum"] == 0


@pytest.mark.parametrize(("name", "near"), [("timeuot", "timeout"), ("Hosst", "hosts"), ("zzzzzz", None)])
def test_an_unknown_name_in_a_participants_own_section_is_an_error_with_the_nearest_one(
    name: str, near: str | None
) -> None:
    write(f"example: {{{name}: 1}}")
    with pytest.raises(SettingsError) as caught:
        Example.load("example")
    end = f"; did you mean {near}?" if near else ""
    assert str(caught.value) == f"local2.yaml, section example: there is no setting {name}{end}"


def test_names_of_others_in_the_defaults_and_in_their_own_sections_are_no_error() -> None:
    write("defaults: {model: m, heartbeat: 2}\nother: {model: n}\nexample: {EXAMPLE_URL: 'http://there', 'Timeout': 3}")
    settings = Example.load("example")
    assert (settings.heartbeat, settings.url, settings.timeout) == (2, "http://there", 3)


def test_what_all_participants_share_can_be_read_for_any_of_them() -> None:
    write("example: {timeout: 4, heartbeat: 7}")
    assert Settings.load("example").heartbeat == 7


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LOCAL2_TIMEOUT", "-1", r"settings of example: timeout \(LOCAL2_TIMEOUT\): Input should be greater than 0"),
        ("LOCAL2_EXAMPLE_TIMEOUT", "-1", r"timeout \(LOCAL2_EXAMPLE_TIMEOUT\): "),
        ("LOCAL2_HOSTS", "[1]", r"hosts\.0 \(LOCAL2_HOSTS\): "),
    ],
)
def test_a_wrong_value_names_the_variable_that_sets_it(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        Example.load("example")


def test_a_wrong_value_of_the_file_names_the_variable_too_by_its_established_name() -> None:
    write("example: {url: [], heartbeat: 0}")
    with pytest.raises(SettingsError) as caught:
        Example.load("example")
    assert "url (EXAMPLE_URL): " in str(caught.value)
    assert "heartbeat (LOCAL2_HEARTBEAT): " in str(caught.value)
