"""The worker as the runtime builds it: settings, arguments, schema."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from services.web_fetch.service import WebFetch, WebFetchSettings, app, build
from shared.errors import SettingsError, ToolError


def test_the_defaults_are_the_agreed_ones() -> None:
    settings = WebFetchSettings()
    assert settings.max_chars == 3_000
    assert settings.timeout == 15
    assert settings.user_agent == "LoCAL2/1.0 (research agent)"
    assert settings.max_bytes == 5_000_000
    assert settings.max_redirects == 5
    assert settings.allowed_private_hosts == []
    assert app.participant == "web_fetch"


@pytest.mark.parametrize(
    "value", ["a.example, b.example:81", '["a.example", "b.example:81"]', "a.example,b.example:81,"]
)
def test_allowed_hosts_come_from_the_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL2_WEB_FETCH_ALLOWED_PRIVATE_HOSTS", value)
    assert WebFetchSettings.load("web_fetch").allowed_private_hosts == ["a.example", "b.example:81"]


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_private_hosts": ["*"]},
        {"allowed_private_hosts": ["http://a.example"]},
        {"allowed_private_hosts": ["10.0.0.0/8"]},
        {"allowed_private_hosts": ["a.example:99999"]},
        {"max_chars": 0},
        {"timeout": -1},
        {"max_redirects": 99},
        {"user_agent": "a\r\nX-Injected: b"},
        {"redis_url": "redis://elsewhere"},
    ],
)
def test_a_wrong_run_time_setting_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        WebFetchSettings().update_settings(values)


def test_every_run_time_setting_is_in_the_schema() -> None:
    assert set(WebFetchSettings.get_settings_schema()["properties"]) == WebFetchSettings.runtime


@pytest.mark.parametrize("args", [{}, {"url": ""}, {"url": "   "}])
def test_a_url_is_required(args: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        WebFetch(**args)


def test_the_model_sees_what_the_argument_is() -> None:
    schema = WebFetch.model_json_schema()
    assert schema["required"] == ["url"]
    assert schema["properties"]["offset"]["description"] == "Characters to skip: the next part of a long page"
    assert schema["properties"]["links"]["type"] == "boolean"
    assert schema["properties"]["url"]["description"] == "Full URL to fetch (must start with http:// or https://)"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_new_allow_list_counts_after_build_is_entered_again(site: Any, reply: Any) -> None:
    site.replies["/"] = reply("<h1>Intranet</h1>")
    settings = WebFetchSettings(timeout=120)
    async with build(settings) as run:
        with pytest.raises(ToolError, match=r"^blocked: 127\.0\.0\.1 is not on the public internet$"):
            await run(WebFetch(url=site.url()))
    async with build(settings.update_settings({"allowed_private_hosts": ["127.0.0.1"]})) as run:
        assert (await run(WebFetch(url=f" {site.url()}\n"))).text == f"URL: {site.url()}\nExtracted text:\nIntranet"


def test_an_idle_worker_has_not_loaded_the_extractor() -> None:
    code = (
        "import sys, services.web_fetch.service\n"
        "heavy = {'trafilatura', 'lxml', 'bs4', 'justext'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
