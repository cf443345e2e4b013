"""The files that Prometheus and Grafana are given: valid, tested, and of one piece."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.promtool import promtool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yml").read_text())
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana/dashboards/local2.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def test_promtool_accepts_the_configuration_and_the_rules(tmp_path: Path) -> None:
    config = (FOLDER / "prometheus.yml").read_text().replace("/etc/local2/observability", str(FOLDER))
    (tmp_path / "prometheus.yml").write_text(config)
    said = promtool("check", "config", tmp_path / "prometheus.yml")
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in said


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    assert "SUCCESS" in promtool("test", "rules", FOLDER / "rules_test.yml")


def test_a_wrong_rule_fails_its_test(tmp_path: Path) -> None:
    text = (FOLDER / "rules.yml").read_text()
    wrong = text.replace(
        'local2_replicas{participant="generator"}) == 0', 'local2_replicas{participant="generator"}) < 0'
    )
    assert wrong != text
    (tmp_path / "rules.yml").write_text(wrong)
    (tmp_path / "rules_test.yml").write_text((FOLDER / "rules_test.yml").read_text())
    with pytest.raises(AssertionError, match="Local2NoGenerator"):
        promtool("test", "rules", tmp_path / "rules_test.yml")


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_is_tested_says_what_to_do_and_has_its_place_in_the_runbook(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    assert name in (FOLDER / "rules_test.yml").read_text()
    assert f"`{name}`" in (ROOT / "docs/observability.md").read_text()
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert len(alert["annotations"]["description"]) > 20


def test_expressions_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    groups = [
        {
            "name": "panels",
            "rules": [
                {"record": f"panel{number}", "expr": target["expr"].replace("$__rate_interval", "1m")}
                for number, target in enumerate(t for panel in PANELS for t in panel.get("targets", ()))
            ],
        }
    ]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": groups}))
    assert "rules found" in promtool("check", "rules", tmp_path / "panels.yml")


def test_panels_have_what_grafana_needs_and_do_not_overlap() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["uid"] == "local2"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries", "table")
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "local2-prometheus"}
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


def test_the_first_row_says_whether_it_is_healthy() -> None:
    first, *panels = PANELS
    assert (first["type"], first["title"]) == ("row", "Is it healthy?")
    stats = [panel for panel in panels if panel["type"] == "stat"]
    assert [panel["title"] for panel in stats] == [
        "Queries per second", "First token, p95", "Failed", "Backlog", "Live generators", "Alerts",
    ]  # fmt: skip
    # in the first screen, side by side
    assert {panel["gridPos"]["y"] for panel in stats} == {1}
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == ["Is it healthy?", "Answers", "Bus", "Models", "Tools", "Judging", "Processes"]


def test_grafana_is_given_the_data_source_that_the_dashboard_asks() -> None:
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["uid"] == "local2-prometheus"
    assert source["editable"] is False
    (provider,) = yaml.safe_load((provisioning / "dashboards/local2.yml").read_text())["providers"]
    assert provider["allowUiUpdates"] is False


def test_what_is_recorded_is_used() -> None:
    shown = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    used = " ".join([*shown, *(alert["expr"] for alert in ALERTS)])
    assert {name for name in RECORDED if not re.search(re.escape(name), used)} == set()
