"""What there is for KV caches on a GPU: pure functions of ``Machine``.

The daemon needs no GPU, so nothing here is an error.
"""

from __future__ import annotations

import re
import resource
from typing import Final

from kvass.cli.doctor.finding import Finding, limit_shown, note, ok, shown, warning
from kvass.cli.doctor.machine import Machine
from kvass.transfer.cuda_driver import SINGLE, Device, obstacle, spelled
from kvass.transfer.descriptors import KERNEL_BELOW

ASK: Final = "only for engines that set kvass.gpu: nobody has seen it work on a GPU yet"
UNCACHED: Final = "an engine whose KV cache is on a GPU runs uncached"
ON_CPU: Final = "engines whose KV cache is on the CPU"
PIN_S_PER_GIB: Final = 0.1
"""Published, of memory that is mapped already; not measured by us."""
VLLM_REFUSES: Final = "expandable_segments:True"
"""In PYTORCH_CUDA_ALLOC_CONF, in this spelling only; torch understands others, and another name."""
NO_DEVICE: Final = re.compile(r"CUDA error 100\b")
"""What CUDA says where there is none, or where all are hidden."""


def devices(m: Machine) -> tuple[Device, ...]:
    """All that the driver told of."""
    return m.driver.devices if m.driver is not None else ()


def obstacles(m: Machine) -> list[str]:
    """Per device why KV caches on it cannot be moved; empty if they can."""
    if m.driver is None:
        return []
    return [obstacle(m.driver.cuda, d.direct, m.driver.batches) for d in m.driver.devices]


def usable(m: Machine) -> bool:
    """Whether KV caches on a GPU of this machine can be moved."""
    return "" in obstacles(m)


def gpu(m: Machine) -> Finding:
    if not devices(m):
        return _no_gpu(m)
    named = ", ".join(f"{d.name} ({shown(d.bytes)})" for d in devices(m))
    reasons = dict.fromkeys(filter(None, obstacles(m)))
    found = "; ".join([f"{named}; {_cuda(m)}", *reasons])
    do = f"install a driver for CUDA 12.8 or later (R570), or try engines with {SINGLE}"
    if not all(device.direct for device in devices(m)):
        do = "use native Linux instead of WSL2, and a driver for CUDA 12.8 or later (R570)"
    if not usable(m):
        return warning(found, "no GPU", UNCACHED, do)
    used = "copies by DMA (cuMemcpyBatchAsync) straight between KV pages and the arena"
    cost = f"the arena is pinned where it is used: some {PIN_S_PER_GIB:g} s per GiB, once"
    if reasons:
        return warning(found, f"{used}; not on all devices", cost, do)
    if "cuda" in m.on_request:
        do = "to try it, set kvass.gpu to true; docs/gpu.md says what is proven, and by what"
        return note(found, f"{used}; {ASK}", cost, do)
    return ok(found, used, cost)


def _cuda(m: Machine) -> str:
    """Which CUDA the driver speaks; empty without a driver."""
    if m.driver is None:
        return ""
    named = f"the driver {m.driver_version}".rstrip()
    return f"{named} speaks CUDA {spelled(m.driver.cuda)}"


def _no_gpu(m: Machine) -> Finding:
    trouble = m.driver.trouble if m.driver is not None else ""
    if hidden := _hidden(m, trouble):
        do = "if an engine here should have some, change that, or ask with the engine's environment"
        return note("; ".join([_cuda(m) or "no NVIDIA driver", *hidden]), ON_CPU, do=do)
    if trouble:
        do = "see that nvidia-smi works here"
        return warning(f"{_cuda(m)}; {trouble}", ON_CPU, UNCACHED, do)
    if m.driver_error:
        do = "see that nvidia-smi works here; a container needs the driver "
        do += "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        return warning(m.driver_error, ON_CPU, UNCACHED, do)
    if m.driver is not None:
        do = "if there are any: give them to this container (--gpus, a device plugin)"
        return note(f"{_cuda(m)}; no device here", ON_CPU, do=do)
    return ok("no NVIDIA driver, and none is needed", ON_CPU)


def _hidden(m: Machine, trouble: str) -> list[str]:
    """The settings that leave no device, where none was found; empty if it is not they."""
    found = []
    if m.nvidia_visible in ("", "none", "void"):
        said = f'NVIDIA_VISIBLE_DEVICES="{m.nvidia_visible}"'
        found.append(f"{said} gives this container no device")
    started = m.driver is not None and bool(m.nodes)
    if m.cuda_visible is not None and started and (not trouble or NO_DEVICE.search(trouble)):
        found.append(f'CUDA_VISIBLE_DEVICES="{m.cuda_visible}" leaves this process no device')
    return found


def locked_memory(m: Machine) -> Finding:
    soft, enough = m.locked[0], shown(m.l1_bytes)
    found = f"ulimit -l {limit_shown(soft, size=True)}"
    users = "`mooncake:` with protocol=rdma"
    unpinned = ", ".join(dict.fromkeys(d.name for d in devices(m) if not d.locks))
    if usable(m) and unpinned:  # GH200, GB200
        return note(
            f"{found}; {unpinned} goes by the host's page tables, and has no page locked",
            f"pages where they are; {users} locks them all the same",
            "copies are right; of pages that the system moves or swaps out meanwhile, slower",
        )
    if m.may_lock is None:
        found += "; whether it binds this process is unknown"
    if m.may_lock:
        found += ", which does not bind this process (CAP_IPC_LOCK)"
    if m.may_lock or soft == resource.RLIM_INFINITY or soft >= m.l1_bytes:
        return ok(found, f"as much as GPUs or {users} pin" if usable(m) else f"only by {users}")
    do = "ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1) for"
    if not usable(m):
        used = f"only by {users}, which needs the arena's {enough}"
        return note(f"{found}, less than the arena", used, do=f"{do} GPUs and {users}")
    return warning(
        f"{found}, less than the arena's {enough}",
        "what the driver lets be pinned; some do not count it against this limit",
        "copies of the rest are right, and several times slower",
        f"{do} engines and {users}",
    )


def expandable_segments(m: Machine) -> Finding:
    if "expandable_segments:true" not in m.allocator.replace(" ", "").lower():
        return ok("off in this environment (the engine's own is what counts)")
    found, do = f"on: {m.allocator}", "leave expandable_segments out of the engine's environment"
    if VLLM_REFUSES in m.allocator.partition("PYTORCH_CUDA_ALLOC_CONF=")[2]:
        cost = "vLLM 0.32 does not start with a KV connector under this, on a CPU neither"
        do += ", or give it --enable-cumem-allocator, whose KV caches are not in such segments"
        return warning(found, "nothing", cost, do)
    cost = "vLLM 0.32 does not see this spelling; such KV caches were never tried"
    if usable(m):
        return warning(found, "KV caches as they are", cost, do)
    return note(found, "nothing: no GPU can be used", f"with GPUs: {cost}", do)


def triton(m: Machine) -> Finding:
    there, unused = m.packages.get("triton"), "nothing, without a GPU that is used"
    needed = f"loads of runs shorter than {shown(KERNEL_BELOW['load'])}"
    if there:
        return ok(f"triton {there}", f"for {needed}" if usable(m) else unused)
    if not usable(m):
        return ok("not installed", unused)
    do = "install it beside torch, in the engine's environment"
    return warning("not installed", "nothing", f"{needed} are slower", do)
