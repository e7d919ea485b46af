"""The files in ``deploy/`` and the list of metrics, against what the program has."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvass.cli.main import main
from kvass.config import load
from kvass.core.metrics import MISSES
from tests.web import metrics_page

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"


def listed() -> set[str]:
    """The metrics of ``docs/monitoring.md``."""
    return set(re.findall(r"^\| `(kvass_\w+)` \|", metrics_page.PAGE.read_text(), re.M))


def unknown(text: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in re.findall(r"\bkvass_\w+", text)} - listed()


def test_the_list_of_metrics_is_what_is_exported() -> None:
    """If not: ``python -m tests.web.metrics_page``."""
    text = metrics_page.PAGE.read_text()
    assert metrics_page.page(text) == text
    assert len(listed()) > 50
    for why, meaning in MISSES.items():
        assert f"| `{why}` | {meaning} |\n" in text


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 5
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    queries += [rule["expr"] for rule in group["rules"]]
    assert {query: unknown(query) for query in queries if unknown(query)} == {}
    assert unknown("rate(kvass_no_such_total[5m])") == {"kvass_no_such_total"}


def test_the_unit_is_valid_and_confined(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd here")
    program = tmp_path / "kvass"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "kvass.service"
    text = (DEPLOY / "kvass.service").read_text()
    unit.write_text(text.replace("/opt/kvass/bin/kvass", str(program)))
    verified = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    checked = [analyze, "security", "--offline=true", "--threshold=20", str(unit)]
    assert subprocess.run(checked, capture_output=True).returncode == 0, "exposure above 2.0"


@pytest.mark.parametrize(
    ("tool", "flags", "file", "right", "wrong"),
    [
        ("hadolint", "", "Dockerfile", "USER", "USR"),
        (
            *("check-jsonschema", "--builtin-schema=vendor.compose-spec", "compose.yml"),
            *("mem_limit", "memlimit"),
        ),
        (
            *("kubernetes-validate", "--strict", "daemonset.yml"),
            *("livenessProbe", "livenesProbe"),
        ),
    ],
)
def test_what_containers_are_made_of_is_valid(
    tool: str, flags: str, file: str, right: str, wrong: str, tmp_path: Path
) -> None:
    program = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, f"no {tool}: run make setup"
    text, broken = (DEPLOY / file).read_text(), tmp_path / file
    broken.write_text(text.replace(right, wrong))
    for path, good in ((DEPLOY / file, True), (broken, False)):
        said = subprocess.run([program, *flags.split(), path], capture_output=True, text=True)
        assert (said.returncode == 0) == good, said.stdout + said.stderr


def environments() -> list[Any]:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    (daemonset,) = yaml.safe_load_all((DEPLOY / "daemonset.yml").read_text())
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    return [
        pytest.param(compose["services"]["kvass"]["environment"], id="compose"),
        pytest.param({e["name"]: e["value"] for e in container["env"]}, id="kubernetes"),
    ]


@pytest.mark.parametrize("environment", environments())
def test_what_containers_set_are_options(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.config.memory_bytes", lambda: 1 << 40)
    assert load({}, environment).http


def test_the_units_flags_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = re.findall(r"^ExecStart=\S+ (.+)$", (DEPLOY / "kvass.service").read_text(), re.M)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvass.config.memory_bytes", lambda: 1 << 40)
        assert main([*line.split(), "--print-config"]) == 0
    assert "http: 127.0.0.1:9273" in capsys.readouterr().out
