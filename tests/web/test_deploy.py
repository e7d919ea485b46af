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

from kvass._version import TESTED_VLLM
from kvass.cli.main import main
from kvass.config import load
from tests.support.browser import debian
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
        ("hadolint", "", "engine.Dockerfile", "USER", "USR"),
        (
            *("check-jsonschema", "--builtin-schema=vendor.compose-spec", "compose.yml"),
            *("mem_limit", "memlimit"),
        ),
        (
            *("kubernetes-validate", "--strict", "kubernetes/daemonset.yml"),
            *("livenessProbe", "livenesProbe"),
        ),
        (
            *("kubernetes-validate", "--strict", "kubernetes/engine.yml"),
            *("volumeMounts", "volumeMount"),
        ),
        (
            *("check-jsonschema", "--builtin-schema=vendor.github-workflows"),
            *("../.github/workflows/release.yml", "runs-on", "run-on"),
        ),
    ],
)
def test_what_containers_are_made_of_is_valid(
    tool: str, flags: str, file: str, right: str, wrong: str, tmp_path: Path
) -> None:
    program = shutil.which(tool, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, f"no {tool}: run make setup"
    text, broken = (DEPLOY / file).read_text(), tmp_path / Path(file).name
    broken.write_text(text.replace(right, wrong))
    for path, good in ((DEPLOY / file, True), (broken, False)):
        said = subprocess.run([program, *flags.split(), path], capture_output=True, text=True)
        assert (said.returncode == 0) == good, said.stdout + said.stderr


def read(file: str) -> Any:
    return yaml.safe_load((DEPLOY / file).read_text())


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program of ``requirements/debian.sh``."""
    command = [str(debian(program)), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_prometheus_takes_its_configuration_rules_and_queries(tmp_path: Path) -> None:
    """Debian's Prometheus knows no Kubernetes, so a static target stands for it."""
    (tmp_path / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    config = read("prometheus.yml")
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": ["a:9273"]}]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]})
    )
    config["rule_files"].append("queries.yml")
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    checked = run("promtool", "check", "config", "--syntax-only", file)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rules[0]["expr"] += ")"
    (tmp_path / "queries.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]})
    )
    assert run("promtool", "check", "rules", tmp_path / "queries.yml").returncode == 1
    job["relabel_config"] = job.pop("relabel_configs")
    file.write_text(yaml.safe_dump(config))
    assert run("promtool", "check", "config", "--syntax-only", file).returncode == 1


def test_panels_stand_beside_each_other() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len({*taken}) == len(taken)
    assert {x % 8 for x, _ in taken} == {y % 7 for _, y in taken} == {0}


def test_the_base_renders_with_its_secret_and_an_engine_mounts_the_same_folder(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder, ignore=shutil.ignore_patterns("read-token"))
    without = run("kubectl", "kustomize", folder)
    assert (without.returncode, "read-token" in without.stderr) == (1, True)
    (folder / "read-token").write_text("0123456789abcdef")
    rendered = run("kubectl", "kustomize", folder)
    assert rendered.returncode == 0, rendered.stderr
    (tmp_path / "all.yml").write_text(rendered.stdout)
    program = str(Path(sys.executable).parent / "kubernetes-validate")
    validate = [program, "--strict", str(tmp_path / "all.yml")]
    assert subprocess.run(validate, capture_output=True).returncode == 0
    parts = {part["kind"]: part for part in yaml.safe_load_all(rendered.stdout)}
    assert {part["metadata"].get("namespace", "kvass") for part in parts.values()} == {"kvass"}
    daemon, engine = parts["DaemonSet"]["spec"], read("kubernetes/engine.yml")["spec"]
    pods = [each["template"]["spec"] for each in (daemon, engine)]
    volumes = [{volume["name"]: volume for volume in pod["volumes"]} for pod in pods]
    secret = volumes[0]["tokens"]["secret"]["secretName"]
    assert (parts["Secret"]["metadata"]["name"], [*parts["Secret"]["data"]]) == (
        *(secret, ["read-token"]),
    )
    assert len({v["socket"]["hostPath"]["path"] for v in volumes}) == 1
    assert len({pod["securityContext"]["runAsUser"] for pod in pods}) == 1
    for pod, named in zip(pods, volumes, strict=True):
        (container,) = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == named.keys()
        assert mounts["socket"] == "/run/kvass"


def test_a_scrape_sends_the_token_that_the_daemon_wants() -> None:
    (job,) = read("prometheus.yml")["scrape_configs"]
    assert job["authorization"]["credentials_file"].endswith("/read-token")
    assert job["job_name"] == "kvass"
    assert 'job="kvass"' in (DEPLOY / "alerts.yml").read_text()
    labels = read("kubernetes/daemonset.yml")["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "kvass"}


def test_the_image_of_an_engine_has_a_tested_vllm_and_the_daemons_socket() -> None:
    text = (DEPLOY / "engine.Dockerfile").read_text()
    versions = re.findall(r"(?:vllm-openai|release-repo):v([\d.]+)", text)
    assert len(versions) == 2
    assert {*versions} <= TESTED_VLLM
    services = read("compose.yml")["services"]
    assert services["engine"]["build"]["args"]["VLLM"].rpartition(":v")[2] in TESTED_VLLM
    (socket,) = re.findall(r"KVASS_SOCKET=(\S+)", text)
    daemon = (DEPLOY / "Dockerfile").read_text()
    assert f"ENV KVASS_SOCKET={socket}\n" in daemon
    assert {"socket:/run/kvass"} == {s["volumes"][0] for s in services.values()}
    assert Path(socket).parent == Path("/run/kvass")
    (home,) = re.findall(r"HOME=(\S+)", text)
    assert f"models:{home}" in services["engine"]["volumes"]
    (pod,) = read("kubernetes/engine.yml")["spec"]["template"]["spec"]["containers"]
    assert {"name": "models", "mountPath": home} in pod["volumeMounts"]
    ignored = (ROOT / ".dockerignore").read_text()
    for copied in ("LICENSE", "README.md", "pyproject.toml", "src"):
        assert f"!{copied}\n" in ignored
    for file in re.findall(r"deploy/[\w.]*Dockerfile", text + daemon + str(services)):
        assert (ROOT / file).is_file()


def test_the_dashboard_and_the_engine_are_published_on_this_machine_alone() -> None:
    services = read("compose.yml")["services"]
    assert services["kvass"]["network_mode"] == "host"
    assert services["kvass"]["environment"]["KVASS_HTTP"] == "127.0.0.1:9273"
    assert services["engine"]["ports"] == ["127.0.0.1:8000:8000"]


def test_the_engine_on_a_cpu_leaves_memory_for_l1() -> None:
    """Without the variable vLLM takes nearly all memory, and refuses to start beside L1."""
    engine = read("compose.yml")["services"]["engine"]
    assert "cpu" in engine["build"]["args"]["VLLM"]
    assert int(engine["environment"]["VLLM_CPU_KVCACHE_SPACE"]) > 0


def environments() -> list[Any]:
    compose = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    (container,) = read("kubernetes/daemonset.yml")["spec"]["template"]["spec"]["containers"]
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
