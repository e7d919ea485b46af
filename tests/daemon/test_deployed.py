"""The files of ``deploy/`` do what they say: each container is started with the user, the mounts,
the read-only root, the limits and the environment that its file has.

L1 is smaller than in the files, and so is the limit of memory: what is between them is the file's.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final

import pytest
import yaml

from kvass.types import Size
from tests.support.containers import IS_ROOT, ROOT, Container, Mount, Running
from tests.support.waiting import eventually

DEPLOY: Final = ROOT / "deploy"
L1: Final = Size(64 << 20)
TOKEN: Final = "0123456789abcdef"
WAIT_S: Final = 30
HTTP: Final = (
    "import sys, urllib.request; "
    "request = urllib.request.Request(sys.argv[1], headers={'Authorization': sys.argv[2]}); "
    "print(urllib.request.urlopen(request, timeout=5).status)"
)
IN_PYTHON: Final = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def image(file: str) -> dict[str, str]:
    """The environment that an image's file sets."""
    text = (DEPLOY / file).read_text()
    words = [line.split() for line in re.findall(r"^ENV (.+)$", text, re.M)]
    return dict(pair.split("=", 1) for line in words for pair in line) | IN_PYTHON


def with_smaller_l1(env: Mapping[str, str], limit: str) -> tuple[dict[str, str], int]:
    """The environment with ``L1``, and the limit of memory that leaves as much beside it."""
    beside = Size.parse(limit) - Size.parse(env["KVASS_L1_SIZE"])
    assert beside >= 1 << 30
    return {**env, "KVASS_L1_SIZE": str(L1)}, L1 + beside


def ready(daemon: Running) -> str:
    assert daemon.process.stdout is not None
    line = daemon.process.stdout.readline()
    assert line.startswith("ready "), daemon.process.communicate(timeout=WAIT_S)
    return line


def warnings(daemon: Running) -> list[str]:
    """What a daemon that is told to end has warned of."""
    os.kill(daemon.pid, signal.SIGTERM)
    log = daemon.process.communicate(timeout=WAIT_S)[1]
    assert daemon.process.returncode == 0, log
    return [line for line in log.splitlines() if " INFO " not in line]


def stored(engine: Container, socket: str, *do: str) -> str:
    """How many rows an engine in that container finds."""
    said = engine.run("python", "-m", "tests.support.stored_rows", socket, *do)
    return said.stdout.strip() or said.stderr


# ---------------------------------------------------------------- Kubernetes


def pod(file: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / file).read_text())["spec"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def secret(folder: Path, mode: int, group: int) -> Path:
    """The volume of the Secret: links to files of root and the pod's fsGroup."""
    (folder / "..now").mkdir(parents=True)
    (folder / "..data").symlink_to("..now")
    (folder / "read-token").symlink_to("..data/read-token")
    file = folder / "..now/read-token"
    file.write_text(TOKEN)
    file.chmod(mode)
    if IS_ROOT:
        os.chown(file, 0, group)
    return folder


def of_pod(file: str, folder: Path, env: Mapping[str, str], init: bool = False) -> Container:
    """The container of a pod, or that which is run before it. The machine's ``/run/kvass`` is in
    the ``folder``, and each container has a folder there, too."""
    spec = pod(file)
    (part,) = spec["initContainers" if init else "containers"]
    where = folder / part["name"]
    of_all, own = spec["securityContext"], part["securityContext"]
    assert own.get("allowPrivilegeEscalation", init) is init
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = dict[str, Mount]()
    for mount in part["volumeMounts"]:
        volume = volumes[mount["name"]]
        path, read_only = mount["mountPath"], mount.get("readOnly", False)
        if "hostPath" in volume:
            (host := folder / "run/kvass").mkdir(parents=True, exist_ok=True)
            assert volume["hostPath"]["path"] == "/run/kvass"
            mounts[path] = Mount(host, read_only)
        elif "secret" in volume:
            mode = volume["secret"]["defaultMode"]
            mounts[path] = Mount(secret(where / "secret", mode, of_all["fsGroup"]), True)
        else:
            size = volume["emptyDir"].get("sizeLimit", "1Gi")
            mounts[path] = Mount(size=Size.parse(f"{size}B"))
    given = {each["name"]: each["value"] for each in part.get("env", [])}
    return Container(
        where,
        own.get("runAsUser", of_all["runAsUser"]),
        of_all["runAsGroup"],
        {**env, **given},
        mounts,
        [of_all["fsGroup"]],
        read_only_root=own.get("readOnlyRootFilesystem", False),
        capabilities="ALL" not in own.get("capabilities", {}).get("drop", ()),
    )


def probe(daemon: Running, said: Mapping[str, Any], ports: Mapping[str, int]) -> None:
    """Ask as the kubelet does, again if the answer is no: L1 may not be populated yet."""
    if "exec" in said:
        command = said["exec"]["command"]
    else:
        url = f"http://127.0.0.1:{ports[said['httpGet']['port']]}{said['httpGet']['path']}"
        command = ["python", "-c", HTTP, url, ""]
    answers = list[CompletedProcess[str]]()

    def well() -> bool:
        answers.append(daemon.exec(*command))
        return answers[-1].returncode == 0

    assert eventually(well), answers[-1].stderr


def test_the_daemonset_starts_and_the_engines_pod_uses_it(tmp_path: Path) -> None:
    spec = pod("daemonset.yml")
    (part,) = spec["containers"]
    daemons = of_pod("daemonset.yml", tmp_path, image("Dockerfile"))
    env, memory = with_smaller_l1(daemons.env, part["resources"]["limits"]["memory"] + "B")
    daemons = replace(daemons, env=env, memory=memory)
    assert daemons.read_only_root
    if IS_ROOT:  # else the folder is this user's, who stands for user 1000, already
        first = of_pod("daemonset.yml", tmp_path, {}, init=True)
        refused = daemons.run("kvass", "serve")
        assert "cannot write /run/kvass/kvass.sock.lock" in refused.stderr, "the control"
        done = first.run(*spec["initContainers"][0]["command"])
        assert done.returncode == 0, done.stderr
    with daemons.started("kvass", "serve") as daemon:
        assert f"socket={env['KVASS_SOCKET']} " in ready(daemon)
        ports = {port["name"]: port["containerPort"] for port in part["ports"]}
        for kind in ("readinessProbe", "livenessProbe"):
            probe(daemon, part[kind], ports)
        metrics = f"http://127.0.0.1:{ports['http']}/metrics"
        scraped = daemon.exec("python", "-c", HTTP, metrics, f"Bearer {TOKEN}")
        assert scraped.stdout == "200\n", scraped.stderr
        for command in (["doctor"], ["run", "--", "true"]):
            said = daemon.exec("kvass", *command)
            assert said.returncode == 0, said.stderr
        engine = of_pod("engine.yml", tmp_path, image("engine.Dockerfile"))
        assert stored(engine, engine.env["KVASS_SOCKET"], "store") == "12"
        assert stored(engine, engine.env["KVASS_SOCKET"]) == "12", "of an engine that has ended"
        assert engine.run("kvass", "status", "--check").stdout == "ok\n"
        (line,) = warnings(daemon)
        assert "tokens travel in plain text" in line, "which the file says, too"
    assert os.listdir(tmp_path / "run/kvass") == []


# ---------------------------------------------------------------- compose


def of_service(name: str, folder: Path, env: Mapping[str, str]) -> Container:
    """The container of a service. Its volumes are new, so Docker gives them the user of the
    image's folder, which is this one."""
    service = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"][name]
    user, group = map(int, service["user"].split(":"))
    mounts = dict[str, Mount]()
    for volume, path in (each.split(":") for each in service["volumes"]):
        (host := folder / "volumes" / volume).mkdir(parents=True, exist_ok=True)
        if IS_ROOT:
            os.chown(host, user, group)
        mounts[path] = Mount(host)
    if "shm_size" in service:
        mounts["/dev/shm"] = Mount(size=Size.parse(service["shm_size"].upper() + "iB"))
    assert not service.keys() & {"read_only", "cap_add", "privileged", "tmpfs"}
    return Container(folder / name, user, group, {**env, **service.get("environment", {})}, mounts)


def test_composes_daemon_starts_and_its_engine_uses_it(tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yml").read_text())["services"]
    daemons = of_service("kvass", tmp_path, image("Dockerfile"))
    limit = services["kvass"]["mem_limit"].upper() + "iB"
    env, memory = with_smaller_l1(daemons.env, limit)
    with replace(daemons, env=env, memory=memory).started("kvass", "serve") as daemon:
        ready(daemon)
        cmd, *health = services["kvass"]["healthcheck"]["test"]
        assert cmd == "CMD"
        assert eventually(lambda: daemon.exec(*health).returncode == 0)
        page = "python", "-c", HTTP, f"http://{env['KVASS_HTTP']}/", ""
        assert eventually(lambda: daemon.exec(*page).returncode == 0)
        engine = of_service("engine", tmp_path, image("engine.Dockerfile"))
        (config,) = [
            json.loads(each.partition("=")[2])
            for each in services["engine"]["command"]
            if each.startswith("--kv-transfer-config=")
        ]
        socket = config["kv_connector_extra_config"]["kvass.socket"]
        assert stored(engine, socket, "store") == "12"
        assert warnings(daemon) == []


# ---------------------------------------------------------------- nothing is there


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        ("serve --l1-size 1MiB", 2, "kvass: no folder /tmp/kvass-54321, and none can be made ("),
        ("run -- true", 2, "kvass: no folder /tmp/kvass-54321, and none can be made ("),
        ("status", 1, "kvass: no daemon at /run/user/54321/kvass.sock, /run/kvass/kvass.sock, "),
        ("explain", 1, "kvass: no daemon at /run/user/54321/kvass.sock, "),
        ("clear", 1, "kvass: no daemon at /run/user/54321/kvass.sock, "),
        ("bench", 2, "kvass: No usable temporary directory found in "),
    ],
)
def test_where_nothing_can_be_written_each_command_says_so_in_one_line(
    tmp_path: Path, command: str, status: int, says: str
) -> None:
    """No home, no user's name, a small ``/dev/shm``, no temporary folder, no socket's name."""
    small = {"/dev/shm": Mount(size=1 << 20)}
    bare = Container(tmp_path, 54_321, 54_321, IN_PYTHON, small, read_only_root=True)
    said = bare.run("kvass", *command.split())
    assert said.returncode == status, said.stderr
    assert said.stderr.splitlines()[-1].startswith(says)
    assert "Traceback" not in said.stderr
