"""What is said of new run-time settings where they are asked for is what the participant itself would say."""

from __future__ import annotations

from typing import Any

import pytest

from services.critic.settings import CriticSettings
from services.generator.settings import GeneratorSettings
from services.web_fetch.service import WebFetchSettings
from shared.errors import SettingsError
from shared.participant.complaint import complaint
from shared.participant.settings import Settings


@pytest.mark.parametrize(
    ("settings", "values", "place"),
    [
        (CriticSettings, {"judges": ["a", "b", "a"]}, "judges: "),
        (CriticSettings, {"judges": ["a", ""]}, "judges.1: "),
        (GeneratorSettings, {"log_level": "info\n"}, "log_level: "),
        (GeneratorSettings, {"log_level": "loud"}, "log_level: "),
        (GeneratorSettings, {"temperature": 3}, "temperature: "),
        (WebFetchSettings, {"user_agent": "me/1.0\n"}, "user_agent: "),
        *(
            (WebFetchSettings, {"allowed_private_hosts": ["a.example", host]}, "allowed_private_hosts.1: ")
            for host in ("*", "a b", "a..b", "http://x", "10.0.0.0/8", "a:99999", "a:0", "a:b", "[::1", "me@a", "")
        ),
    ],
)
def test_what_the_participant_would_refuse_is_refused_where_it_is_asked_for(
    settings: type[Settings], values: dict[str, Any], place: str
) -> None:
    with pytest.raises(SettingsError):
        settings().update_settings(values)
    said = complaint(settings.get_settings_schema(), values)
    assert said is not None
    assert said.startswith(place)


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (CriticSettings, {"judges": ["a", "b"]}),
        (GeneratorSettings, {"log_level": "debug", "temperature": None, "system_prompt": "Price in $"}),
        (WebFetchSettings, {"user_agent": "me/1.0 (a@b)"}),
        (
            WebFetchSettings,
            {
                "allowed_private_hosts": [
                    "nas", "nas.", " a_b.example:8080 ", "10.0.0.1", "10.0.0.1:65535", "[fd00::1]:80",
                    "münchen.example", "a:", "a:080",
                ]
            },
        ),
    ],
)  # fmt: skip
def test_what_it_takes_is_taken(settings: type[Settings], values: dict[str, Any]) -> None:
    settings().update_settings(values)
    assert complaint(settings.get_settings_schema(), values) is None
