"""What Prometheus and Grafana are given is what they take: Prometheus by its own promtool, Grafana
by what its provisioning and its panels need, as no Grafana is in Debian's packages."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip(
    "dockerfile_parse", reason="dockerfile-parse is not installed; pip install -e '.[dev]'"
)

from tests.compose.services import FOLDER, load

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)
RULES = FOLDER / "prometheus" / "rules" / "asyncdock.yml"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "asyncdock.json"


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_takes_configuration_and_rules(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "prometheus", tmp_path / "prometheus")
    (tmp_path / "token").touch()
    config = tmp_path / "prometheus" / "prometheus.yml"
    text = config.read_text().replace("/etc/prometheus/", f"{tmp_path}/prometheus/")
    config.write_text(text.replace("/run/secrets/metrics_token", str(tmp_path / "token")))
    assert "SUCCESS" in promtool("check", "config", str(config))
    assert "SUCCESS" in promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


@needs_promtool
def test_each_alert_fires_for_what_it_is_for_and_no_sooner() -> None:
    tests = Path(__file__).parent / "alerts.test.yml"
    promtool("test", "rules", str(tests))
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    quiet: set[str] = set()
    fires: set[str] = set()
    for test in yaml.safe_load(tests.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert alerts == fires == quiet


def test_prometheus_asks_the_api_where_it_listens() -> None:
    jobs = {
        job["job_name"]: job
        for job in yaml.safe_load((FOLDER / "prometheus/prometheus.yml").read_text())[
            "scrape_configs"
        ]
    }
    listening = next(
        part for part in load()["services"]["api"]["command"] if part.startswith("--listen=")
    )
    assert jobs["asyncdock"]["static_configs"][0]["targets"] == [
        f"api:{listening.rpartition(':')[2]}"
    ]
    secret = Path(jobs["asyncdock"]["authorization"]["credentials_file"])
    assert secret.parent == Path("/run/secrets")
    assert secret.name in load()["services"]["prometheus"]["secrets"]
    assert set(load()["services"]["api"]["networks"]) & set(
        load()["services"]["prometheus"]["networks"]
    )


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    service = load()["services"]["grafana"]
    mounted = {
        place: source
        for source, place, _ in (mount.split(":") for mount in service["volumes"] if ":ro" in mount)
    }
    provisioning = FOLDER / mounted["/etc/grafana/provisioning"]
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == "prometheus"
    assert source["isDefault"]
    assert set(service["networks"]) & set(load()["services"]["prometheus"]["networks"])
    [provider] = yaml.safe_load((provisioning / "dashboards/asyncdock.yaml").read_text())[
        "providers"
    ]
    folder = FOLDER / mounted[provider["options"]["path"]]
    assert [path.name for path in folder.iterdir()] == ["asyncdock.json"]
    home = Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (FOLDER / mounted[str(home.parent)] / home.name).is_file()
    dashboard = json.loads(DASHBOARD.read_text())
    for part in [*panels(dashboard), *dashboard["templating"]["list"]]:
        assert part["datasource"] == {"type": "prometheus", "uid": source["uid"]}


def test_the_dashboard_is_one_that_grafana_draws() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert {"uid", "title", "schemaVersion", "templating", "time", "refresh"} <= set(dashboard)
    assert "id" not in dashboard
    assert "__inputs" not in dashboard
    drawn = dashboard["panels"]
    assert len({panel["id"] for panel in drawn}) == len(drawn)
    assert len({panel["title"] for panel in panels(dashboard)}) == len(panels(dashboard))
    taken: set[tuple[int, int]] = set()
    for panel in drawn:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["type"] in {"timeseries", "stat", "bargauge", "state-timeline"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
