"""What the file says to the gateway, as its clients hear it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.launch.plan import PARTICIPANTS
from services.cli.launch.run import longest_drain, welcome
from services.cli.local_files import FileTrouble, whole_file
from services.cli.settings import ClientSettings, ModelConfig
from services.cli.words import typed
from shared.errors import SettingsError
from shared.participant.settings import misspelt_sections


def write(text: str) -> None:
    Path("local2.yaml").write_text(text, encoding="utf-8")


def test_address_key_and_folder_in_the_gateways_section_are_heard() -> None:
    write("gateway: {host: 127.0.0.2, port: 9001, admin_key: operators-key, data_dir: kept, max_backlog: 3}")
    settings = ClientSettings.load()
    assert (settings.base_url, settings.key()) == ("http://127.0.0.2:9001", "operators-key")
    assert settings.data_dir == Path("kept")


def test_what_is_said_to_the_command_line_itself_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    write("gateway: {host: 127.0.0.2, port: 9001}\ncli: {api_port: 9002}")
    assert ClientSettings.load().base_url == "http://127.0.0.2:9002"
    assert ClientSettings.load("cli", {"api_port": 9003}).api_port == 9003
    monkeypatch.setenv("LOCAL2_API_PORT", "9004")
    assert ClientSettings.load().base_url == "http://127.0.0.2:9004"


def test_a_wrong_port_of_the_gateway_names_its_section() -> None:
    write("gateway: {port: 0}")
    with pytest.raises(SettingsError, match=r"settings of gateway: port \(LOCAL2_API_PORT\)"):
        ClientSettings.load()


def test_a_class_that_knows_a_part_of_a_section_does_not_mind_the_rest() -> None:
    write("generator: {model: m, num_ctx: 8000}")
    assert ModelConfig.load("generator").model == "m"


def test_the_stop_waits_for_the_participant_with_the_longest_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_drain() == 5
    write("web_fetch: {drain: 40, max_chars: 5}")
    assert longest_drain() == 40
    monkeypatch.setenv("LOCAL2_RESPONDENT_B_DRAIN", "60")
    assert longest_drain() == 60


async def test_a_key_from_the_file_is_not_said_to_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ClientSettings(api_url="http://127.0.0.1:9", admin_key="operators-key")
    text = await welcome(settings)
    assert "LOCAL2_ADMIN_KEY" not in text
    assert "operators-key" not in text
    monkeypatch.setenv("LOCAL2_ADMIN_KEY", "operators-key")
    assert 'Bearer $LOCAL2_ADMIN_KEY"' in await welcome(settings)


async def test_the_command_that_is_shown_finds_the_stack_that_shows_it(tmp_path: Path) -> None:
    assert '  try: local2 ask "' in (await welcome(ClientSettings(api_port=8765))).replace(typed("ask"), "local2 ask")
    elsewhere = await welcome(ClientSettings(api_port=9, data_dir=tmp_path / "my data"))
    assert f"  try: LOCAL2_API_URL=http://127.0.0.1:9 LOCAL2_DATA_DIR='{tmp_path}/my data' {typed('ask')} " in elsewhere


def test_a_section_that_is_nearly_a_participants_is_named() -> None:
    write("genrator: {temperature: 0.3}\nmy_tool: {speed: 9}\ndefaults: {}")
    names = [*PARTICIPANTS, "cli"]
    assert misspelt_sections(names) == ["local2.yaml: nobody reads the section genrator; did you mean generator?"]
    write("generator: {temperature: 0.3}")
    assert misspelt_sections(names) == []


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"before")

    def broken_off() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise RuntimeError("the connection broke")

    with pytest.raises(RuntimeError):
        broken_off()
    assert path.read_bytes() == b"before"
    with whole_file(path) as file:
        file.write(b"whole")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"whole", 0o600)
    with pytest.raises(FileTrouble, match="x cannot be written: No such file or directory; choose"):
        whole_file(tmp_path / "nowhere" / "x").__enter__()
    assert [one for one in tmp_path.iterdir() if ".part" in one.name] == []
