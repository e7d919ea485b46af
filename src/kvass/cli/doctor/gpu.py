"""What the facts mean for KV caches on a GPU. Law of this file: that of ``findings``.

The daemon needs no GPU, so nothing here is an error.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from typing import Final

from kvass.cli.doctor.findings import Finding, limit_shown, shown
from kvass.cli.doctor.machine import Machine
from kvass.transfer.cuda_driver import SINGLE, Device, Survey, obstacle, spelled
from kvass.transfer.descriptors import KERNEL_BELOW

ASK: Final = "only for engines that set kvass.gpu: nobody has seen it work on a GPU yet"
UNCACHED: Final = "an engine whose KV cache is on a GPU runs uncached"
PIN_S_PER_GIB: Final = 0.1
"""Published, of memory that is mapped already; not measured by us."""
VLLM_REFUSES: Final = "expandable_segments:True"
"""In PYTORCH_CUDA_ALLOC_CONF, in this spelling only; torch understands others, and another name."""
NO_DEVICE: Final = re.compile(r"CUDA error 100\b")
"""What CUDA says where there is none, or where all are hidden."""


def usable(m: Machine) -> bool:
    """Whether KV caches on a GPU of this machine can be moved."""
    found = m.driver
    return found is not None and any(not _obstacle(found, d) for d in found.devices)


def _obstacle(found: Survey, device: Device) -> str:
    return obstacle(found.cuda, device.direct, found.batches)


def gpu(m: Machine) -> Finding:
    name = "GPU"
    if m.driver is None or not m.driver.devices:
        return _without(m)
    cuda = _spoken(m.driver, m)
    devices = ", ".join(f"{d.name} ({shown(d.bytes)})" for d in m.driver.devices)
    obstacles = {reason: None for d in m.driver.devices if (reason := _obstacle(m.driver, d))}
    found = "; ".join([f"{devices}; {cuda}", *obstacles])
    if not usable(m):
        return Finding(name, "warning", found, "no GPU", UNCACHED, _remedy(m))
    used = "copies by DMA (cuMemcpyBatchAsync) straight between KV pages and the arena"
    cost = f"the arena is pinned where it is used: some {PIN_S_PER_GIB:g} s per GiB, once"
    if obstacles:
        return Finding(name, "warning", found, f"{used}; not on all devices", cost, _remedy(m))
    if "cuda" in m.on_request:
        do = "to try it, set kvass.gpu to true; docs/gpu.md says what is proven, and by what"
        return Finding(name, "note", found, f"{used}; {ASK}", cost, do)
    return Finding(name, "ok", found, used, cost)


def _spoken(found: Survey, m: Machine) -> str:
    named = f"the driver {m.driver_version}".rstrip()
    return f"{named} speaks CUDA {spelled(found.cuda)}"


def _without(m: Machine) -> Finding:
    """No device was found."""
    name = "GPU"
    used = "engines whose KV cache is on the CPU"
    library = "" if m.driver is None else f"{_spoken(m.driver, m)}; "
    if hidden := _hidden(m):
        missing = "" if m.driver is not None else "no NVIDIA driver; "
        do = "if an engine here should have some, change that, or ask with the engine's environment"
        return Finding(name, "note", f"{library}{missing}{hidden}", used, do=do)
    if m.driver is not None and m.driver.trouble:
        found, do = library + m.driver.trouble, "see that nvidia-smi works here"
        return Finding(name, "warning", found, used, UNCACHED, do)
    if m.driver_error:
        do = "see that nvidia-smi works here; a container needs the driver "
        do += "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return Finding(name, "warning", m.driver_error, used, UNCACHED, do)
    if m.driver is not None:
        do = "if there are any: give them to this container (--gpus, a device plugin)"
        return Finding(name, "note", f"{library}no device here", used, do=do)
    return Finding(name, "ok", "no NVIDIA driver, and none is needed", used)


def _hidden(m: Machine) -> str:
    """The settings that leave no device, where none was found; empty if it is not they."""
    found = []
    if m.nvidia_visible in ("", "none", "void"):
        said = f'NVIDIA_VISIBLE_DEVICES="{m.nvidia_visible}"'
        found.append(f"{said} gives this container no device")
    started = m.driver is not None and bool(m.nodes)
    trouble = m.driver.trouble if m.driver is not None else ""
    if m.cuda_visible is not None and started and (not trouble or NO_DEVICE.search(trouble)):
        found.append(f'CUDA_VISIBLE_DEVICES="{m.cuda_visible}" leaves this process no device')
    return "; ".join(found)


def _remedy(m: Machine) -> str:
    assert m.driver is not None
    if any(not device.direct for device in m.driver.devices):
        return "use native Linux instead of WSL2, and a driver for CUDA 12.8 or later (R570)"
    return f"install a driver for CUDA 12.8 or later (R570), or try engines with {SINGLE}"


def pinning(m: Machine) -> Finding:
    name, soft = "locked memory", m.locked[0]
    found = f"ulimit -l {limit_shown(soft, size=True)}"
    users = "`mooncake:` with protocol=rdma"
    if usable(m) and (loose := _loose(m)):
        return Finding(
            name,
            "note",
            f"{found}; {loose} goes by the host's page tables, and has no page locked",
            "pages where they are; `mooncake:` with protocol=rdma locks them all the same",
            "copies are right; of pages that the system moves or swaps out meanwhile, slower",
        )
    if m.may_lock is None:
        found += "; whether it binds this process is unknown"
    if m.may_lock:
        found += ", which does not bind this process (CAP_IPC_LOCK)"
    if m.may_lock or soft == resource.RLIM_INFINITY or soft >= m.l1_bytes:
        used = f"as much as GPUs or {users} pin" if usable(m) else f"only by {users}"
        return Finding(name, "ok", found, used)
    do = f"ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1) for {{}} and {users}"
    if not usable(m):
        used = f"only by {users}, which needs the arena's {shown(m.l1_bytes)}"
        return Finding(name, "note", f"{found}, less than the arena", used, do=do.format("GPUs"))
    return Finding(
        name,
        "warning",
        f"{found}, less than the arena's {shown(m.l1_bytes)}",
        "what the driver lets be pinned; some do not count it against this limit",
        "copies of the rest are right, and several times slower",
        do.format("engines"),
    )


def _loose(m: Machine) -> str:
    """The devices for which registering memory locks none of it (GH200, GB200)."""
    found = m.driver.devices if m.driver is not None else ()
    return ", ".join(dict.fromkeys(device.name for device in found if not device.locks))


def expandable_segments(m: Machine) -> Finding:
    name = "expandable segments"
    if not is_expandable(m.allocator):
        return Finding(name, "ok", "off in this environment (the engine's own is what counts)")
    found, do = f"on: {m.allocator}", "leave expandable_segments out of the engine's environment"
    if VLLM_REFUSES in m.allocator.partition("PYTORCH_CUDA_ALLOC_CONF=")[2]:
        cost = "vLLM 0.32 does not start with a KV connector under this, on a CPU neither"
        do += ", or give it --enable-cumem-allocator, whose KV caches are not in such segments"
        return Finding(name, "warning", found, "nothing", cost, do)
    cost = "vLLM 0.32 does not see this spelling; such KV caches were never tried"
    if usable(m):
        return Finding(name, "warning", found, "KV caches as they are", cost, do)
    return Finding(name, "note", found, "nothing: no GPU can be used", f"with GPUs: {cost}", do)


def is_expandable(allocator: str) -> bool:
    """Whether these settings ask for them."""
    return "expandable_segments:true" in allocator.replace(" ", "").lower()


def triton(m: Machine) -> Finding:
    name, there = "triton", m.packages.get("triton")
    needed = f"loads of runs shorter than {shown(KERNEL_BELOW['load'])}"
    if there:
        used = f"for {needed}" if usable(m) else "nothing, without a GPU that is used"
        return Finding(name, "ok", f"triton {there}", used)
    if not usable(m):
        return Finding(name, "ok", "not installed", "nothing, without a GPU that is used")
    do = "install it beside torch, in the engine's environment"
    return Finding(name, "warning", "not installed", "nothing", f"{needed} are slower", do)


GPUS: Final[tuple[Callable[[Machine], Finding], ...]] = (
    *(gpu, pinning, expandable_segments, triton),
)
