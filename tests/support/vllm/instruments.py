"""Measures and disturbs the connector inside an engine's processes, from outside.

Once the engine is up, the connector's hooks are wrapped and the mover's clock is replaced; shipped
code knows nothing of it. Functions that take ``worker`` run in a rank's process, through vLLM's
``collective_rpc``.
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from inspect import getattr_static, isfunction
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np

from kvass.client import scheduler
from kvass.engine import adapters
from kvass.transfer.base import Job
from tests.support.vllm.process import Hooks, Pages, Settings

HOOKS: Final = (
    # the scheduler's
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
    "has_pending_push_work",
    # the worker's
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
)
PATIENCE_S: Final = 10.0


def transfer_config(config: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` of an engine with kvass. ``config``: its child's."""
    return {
        "kv_connector": "KvassConnector",
        "kv_connector_module_path": config["module"],
        "kv_role": "kv_both",
        "kv_connector_extra_config": config["connector"],
    }


class RunningClock:
    """Time, but that in which this process's Python threads wait for a CPU: what a busy machine
    takes. An idle one takes none."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._waited: dict[int, int] = {}

    def __call__(self) -> float:
        for thread in threading.enumerate():
            self._read(thread.native_id or 0)
        return time.monotonic() - sum(self._waited.values()) / 1e9

    def _read(self, thread: int) -> None:
        """proc(5), schedstat: time on a CPU, and time spent waiting for one, in ns."""
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
            self._waited[thread] = int(os.pread(self._files[thread], 64, 0).split()[1])
        except OSError:
            return  # it has just ended; what it had waited still counts


class Probe:
    """Times every hook of a connector, and sends armed signals when hooks are called."""

    def __init__(self) -> None:
        self._now_s = RunningClock()
        self.unstored = 0
        """Requests that ended without all of them being stored."""
        self.in_step = 0
        """Loads that were copied inside a step."""
        self.clear()

    def clear(self) -> None:
        """Forget all measurements and disarm all signals."""
        self.longest: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self.none_since: dict[str, float] = {}
        self.told_none: dict[str, float] = {}
        self.preemptions = 0
        self.armed: dict[tuple[str, str], list[tuple[int, int, float]]] = {}
        self.settings = Settings()
        self.pages = Pages([], [])

    def arm(self, hook: str, when: str, signals: Iterable[Sequence[Any]]) -> None:
        """At the next call of ``hook``, ``before`` or ``after`` it, send (pid, signal, after_s)."""
        self.armed[hook, when] = [(pid, number, after_s) for pid, number, after_s in signals]

    def clock(self) -> float:
        """The clock of a mover."""
        return time.monotonic() + self.settings.ahead_s

    def slow_clock(self) -> float:
        """The clock of a host mover, which reads it before every row on the copy thread."""
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.settings.copy_delay_s)
        return self.clock()

    def wrap(self, connector: object) -> None:
        """Wrap every hook that the connector has."""
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def count_preemptions(self, scheduler: Any) -> None:
        """Count preemptions."""
        preempt = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._fire(name, "before")
            start = self._now_s()
            try:
                result = hook(*args, **kwargs)
            finally:
                took = self._now_s() - start
                self.longest[name] = max(took, self.longest.get(name, 0.0))
                self.calls[name] = self.calls.get(name, 0) + 1
                self._fire(name, "after")
            if name == "get_num_new_matched_tokens":
                self._asked(args[0].request_id, result[0])
            return result

        return timed

    def _asked(self, request: str, answer: int | None) -> None:
        now = self._now_s()
        if answer is None:
            self.told_none[request] = now - self.none_since.setdefault(request, now)
        elif request in self.none_since:
            self.told_none[request] = now - self.none_since.pop(request)

    def _fire(self, name: str, when: str) -> None:
        for pid, signal, after_s in self.armed.pop((name, when), []):
            if after_s:
                timer = threading.Timer(after_s, os.kill, (pid, signal))
                timer.daemon = True
                timer.start()
            else:
                os.kill(pid, signal)

    def report(self) -> Hooks:
        """The measurements."""
        return Hooks(
            longest_s=self.longest,
            calls=self.calls,
            told_none_s=max(self.told_none.values(), default=0.0),
            told_none=len(self.told_none),
            preemptions=self.preemptions,
        )


class HookClock:
    """The seconds that the engine's thread spends in the hooks of a connector, of any make. Unlike
    ``Probe`` it disturbs nothing, and takes half a microsecond a call."""

    def __init__(self, *connectors: object) -> None:
        self.seconds = 0.0
        self._inside = False
        for connector in connectors:
            made = type(connector)
            for name in dir(made):
                if not name.startswith("_") and isfunction(getattr_static(made, name)):
                    setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one hook calls another
                return hook(*args, **kwargs)
            self._inside, began_s = True, time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began_s
                self._inside = False

        return timed


_here = Probe()


def here() -> Probe:
    """This process's probe."""
    return _here


def pack_no_weights() -> None:
    """Keep DeepSeek-V4 from packing weights with kernels that not every CPU has."""
    from vllm.models.deepseek_v4.cpu import cpu_sparse

    attention: Any = cpu_sparse.DeepseekV4CPUAttention
    attention._wrap_wo_a_process_weights_after_loading = lambda self: None


def fork_ranks() -> None:
    """Have vLLM fork its processes, as it does by default; on a CPU it spawns them."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def scan_dicts_only() -> None:
    """Keep vLLM from failing where llvmlite is imported, as by LMCache: on a CPU it looks at the
    attributes of everything in every module, and takes what ``vars`` returns for a dict."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # vLLM 0.30 does not look
        return

    def dicts_only(value: object) -> dict[str, Any]:
        return found if isinstance(found := vars(value), dict) else {}

    vars(dispatcher)["vars"] = dicts_only


def prepare(connector: Any, patient: bool, late: bool) -> None:
    """Count the requests that ``connector``'s scheduler half does not store, and make it hold no
    blocks while ``late_stores`` is set. If
    ``patient``, it waits for answers without a timeout; if ``late``, not for grants. In a
    ``MultiConnector`` the one of kvass is meant."""
    children = getattr(connector, "_connectors", [connector])
    (planner,) = (one._planner for one in children if hasattr(one, "_planner"))
    if planner is None:  # inert
        return
    count = planner.traffic.count

    def counting(name: str, number: int = 1) -> None:
        _here.unstored += number if name == "unstored_requests" else 0
        count(name, number)

    planner.traffic.count = counting
    pool = planner.stores._pool
    hold = pool.hold
    pool.hold = lambda ids: [] if _here.settings.late_stores else hold(ids)
    if patient:
        client = planner.client
        client.step.wait_s = client.step.left_s = PATIENCE_S
        vars(scheduler)["LATE_S"] = PATIENCE_S
        client._reserve_wait_s = 0.0 if late else PATIENCE_S
        vars(adapters).update(WAIT_S=PATIENCE_S, PATIENCE_S=PATIENCE_S)


class BlendControls:
    """Breaks blend on purpose, in an engine of one process, and counts what is computed."""

    ASKED: Final = ("cacheable", "next_token", "limit", "loaded")
    """What vLLM's scheduler asks the planner, besides the connector's hooks."""

    def __init__(self, scheduler: Any) -> None:
        from kvass.connectors.vllm.blend_oracle import KeptSegments

        self._blender = scheduler.connector.blender
        self._patches: list[Any] = []
        self._placed: tuple[Any, Any] | None = None
        self.counts: Counter[str] = Counter()
        schedule, count = scheduler.schedule, self._blender._planner.traffic.count

        def counting(*args: Any) -> Any:
            output = schedule(*args)
            self.counts["computed"] += output.total_num_scheduled_tokens
            return output

        def noting(name: str, number: int = 1) -> None:
            self.counts[name] += number
            count(name, number)

        scheduler.schedule, self._blender._planner.traffic.count = counting, noting
        placer = connector()._placer
        place = placer._place

        def keeping(one: Any) -> Any:
            done = place(one)
            self._placed = one, placer._layers[0].read(list(one.table))
            return done

        placer._place = keeping
        self.chosen: list[int] = []
        """Which tokens of segments the oracle took last for computed."""
        choose = KeptSegments.choose

        def noting_selection(one: Any, computed: Any) -> None:
            self.chosen = sorted({*computed.tolist()} & {*one.at.tolist()})
            choose(one, computed)

        mock.patch.object(KeptSegments, "choose", noting_selection).start()

    def first_layer_error(self) -> list[float]:
        """How far K and V of the first layer were from what is in their place now, where segments
        stand: the largest difference. Both depend on a token and its position alone."""
        assert self._placed is not None
        one, placed = self._placed
        inside = [t for s in one.spans for t in range(s.new, s.new + len(s.blocks) * 32)]
        there = connector()._placer._layers[0].read(list(one.table))
        pairs = zip(placed, there, strict=True)
        return [float((a[inside] - b[inside]).abs().max()) for a, b in pairs]

    def set(self, select: str, control: str) -> dict[str, int]:
        """From now on tokens are chosen by ``select``, or are those of its numbers
        (``0-20,100-150``), and each ``control`` is broken, or on; returns the counts since the last
        call."""
        from kvass.blend import plan
        from kvass.blend.rope import Move
        from kvass.connectors.vllm.blend_oracle import Oracle
        from kvass.connectors.vllm.blend_pages import LayerPages
        from kvass.connectors.vllm.blend_planner import BlendPlanner
        from kvass.engine.planner import Planner

        for one in self._patches:
            one.stop()
        raises = mock.Mock(side_effect=RuntimeError("control"))
        broken: dict[str, list[tuple[Any, str, Any]]] = {
            "": [],
            "off": [(BlendPlanner, "_find", lambda *_: False)],
            "not moved": [(Move, "__call__", lambda _, stored, tokens: stored.clone())],
            "no salt": [(BlendPlanner, "_salt", lambda *_: None)],
            "no prefix": [(Planner, "match", lambda *_: 0)],
            "not placed": [(LayerPages, "moved", raises)],
            "oracle": [(self._blender, "_oracle", True)],
            "not replaced": [(Oracle, "replace", lambda *_: None)],
            **{name: [(BlendPlanner, name, raises)] for name in BlendControls.ASKED},
        }
        controls = [one for name in control.split(", ") for one in broken[name]]
        self._patches = [mock.patch.object(*one) for one in controls]
        for one in self._patches:
            one.start()
        if select[0].isdigit():
            ranges = [range(*map(int, one.split("-"))) for one in select.split(",")]
            self._blender._selection = lambda _: [i for each in ranges for i in each]
        else:
            self._blender._selection = plan.parse(select)
        counts, self.counts = self.counts, Counter()
        return dict(counts)


# ---------------------------------------------------------------- in a rank's process


def install(worker: Any) -> int:
    """Wrap this process's connector; returns the process's id."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    _make_stage_buffers(worker.model_runner)
    if has_kv_transfer_group():
        connector: Any = get_kv_transfer_group()
        _here.wrap(connector)
        if connector._copier is not None:  # it is inert
            _watch(connector)
            _flip(connector._copier._verifier)
            clock = _here.slow_clock if _gpu() is None else _here.clock
            connector._copier._mover._clock = clock
            _count_in_step(connector._copier.traffic)
            _make_late(connector._copier._mover)
    return os.getpid()


def _count_in_step(traffic: Any) -> None:
    count = traffic.count

    def counting(name: str, number: float = 1) -> None:
        _here.in_step += name == "loads_in_step"
        count(name, number)

    traffic.count = counting


def _make_late(mover: Any) -> None:
    copy_now = mover.copy_now

    def late(job: Job) -> None:
        copy_now(replace(job, deadline_s=0.0) if _here.settings.late_in_step else job)

    mover.copy_now = late


def connected(worker: Any) -> bool:
    """Whether this rank is registered with its daemon."""
    return bool(connector()._copier._client.connected)


def in_step(worker: Any) -> int:
    """How many loads this rank has copied inside steps."""
    return _here.in_step


def report(worker: Any) -> Hooks:
    """The measurements of this rank."""
    return _here.report()


def clear(worker: Any) -> None:
    """Forget all measurements, and disturb nothing."""
    _here.clear()
    _disturb_gpu()


def disturb(worker: Any, rank: int | None, settings: dict[str, Any]) -> None:
    """Disturb this ``rank``, or all (None), from now on."""
    if rank in (None, worker.rank):
        _here.settings = msgspec.convert(settings, Settings)
        _disturb_gpu()


def switch_on(connector: Any) -> None:
    """Have the scheduler's half of ``connector`` use the cache again after a wrong copy."""
    connector._planner.off = False
    connector._planner.stores._stores = True


def verify_again(worker: Any) -> None:
    """As if nothing had been verified yet."""
    verifier = connector()._copier._verifier
    verifier.difference = ""
    verifier._rows.clear()


def arm(worker: Any, rank: int, hook: str, when: str, signals: list[list[Any]]) -> None:
    """``Probe.arm`` in the process of this ``rank``."""
    if rank == worker.rank:
        _here.arm(hook, when, signals)


def scrub(worker: Any) -> None:
    """Fill every page with a byte that differs by rank: then only loaded pages are right.

    The bytes make small finite floats: attention multiplies masked values with 0, and a NaN would
    stay a NaN.
    """
    for region in regions(connector()):
        region[:] = 0x3A + worker.rank


def replace_weights(worker: Any, by: int) -> None:
    """Replace weights in place: token t is embedded as t - ``by`` was."""
    for name, weight in worker.get_model().named_parameters():
        if "embed_tokens" in name:
            weight.data.copy_(weight.data.roll(by, 0))


def pages(worker: Any) -> Pages:
    """Digests of this rank's pages, when they were stored and after they were loaded."""
    return _here.pages


def merged(reports: Sequence[Hooks]) -> Hooks:
    """The measurements of all probes of an engine as one."""
    names = {name for one in reports for name in one.longest_s}
    return Hooks(
        longest_s={n: max(one.longest_s.get(n, 0.0) for one in reports) for n in names},
        calls={n: sum(one.calls.get(n, 0) for one in reports) for n in names},
        told_none_s=max(one.told_none_s for one in reports),
        told_none=sum(one.told_none for one in reports),
        preemptions=sum(one.preemptions for one in reports),
    )


def has_connector() -> bool:
    """Whether the worker, with its half of the connector, is in this process."""
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    return bool(has_kv_transfer_group())


def connector() -> Any:
    """The worker's half of the connector in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def _gpu() -> Any:
    """The mover of this rank's fake GPU; None if it has none."""
    return getattr(connector(), "mover", None) if has_connector() else None


def _disturb_gpu() -> None:
    if (gpu := _gpu()) is not None:
        gpu.slow(_here.settings.copy_delay_s)
        gpu.fake.break_(_here.settings.broken_gpu)


def _make_stage_buffers(runner: Any) -> None:
    """Make the buffers into which a later pipeline stage receives. vLLM 0.32 makes them in its
    warm-up, which an eager engine on a CPU skips; then its first step fails."""
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _watch(connector: Any) -> None:
    """Digest or spoil the pages of every copy (``Settings``)."""
    load, save, results = (
        connector.start_load_kv,
        connector.wait_for_save,
        connector.get_transfer_results,
    )
    loading: dict[str, tuple[tuple[int, ...], ...]] = {}
    late: list[tuple[int, Any]] = []

    def spoil(blocks: tuple[tuple[int, ...], ...]) -> None:
        for group, ids in enumerate(blocks):
            if _here.settings.spoils(group):
                for page in pages_of(connector, ids, group):
                    page[:] = 0

    def start_load_kv(*args: Any, **kwargs: Any) -> None:
        for one in connector._get_connector_metadata().loads:
            skips = zip(one.blocks, one.skip, strict=True)
            loading[one.request] = tuple(ids[skip:] for ids, skip in skips)
            if one.in_step:  # it has ended: the step that begins computes with it
                spoil(loading[one.request])
        load(*args, **kwargs)

    def wait_for_save() -> None:
        if _here.settings.watch:
            for one in connector._get_connector_metadata().stores:
                _here.pages.stored.extend(_digests(connector, one.blocks))
        if _here.settings.late_stores:
            late.append((_here.settings.late_stores, connector._get_connector_metadata()))
            connector._copier._unstored = None  # else the next step would store it
        else:
            save()

    def get_transfer_results(finished: set[str]) -> Any:
        waiting, late[:] = late[:], []
        for steps, work in waiting:
            if steps:
                late.append((steps - 1, work))
            else:
                connector._copier.store(work)
        ended = results(finished)
        for request in ended.finished_recving or ():
            blocks = loading.pop(request, ())  # of a blended request these are others
            if _here.settings.watch:
                _here.pages.loaded.extend(_digests(connector, blocks))
            spoil(blocks)
        return ended

    connector.start_load_kv = start_load_kv
    connector.wait_for_save = wait_for_save
    connector.get_transfer_results = get_transfer_results


def _flip(verifier: Any) -> None:
    """Flip a byte of a copy before it is verified (``Settings.flip``): in its last plane, in the
    last page of its last row. That row is verified if the job has no other."""
    check, memory = verifier.check, verifier._memory

    def flipped(job: Any, holds: Any) -> Any:
        settings = _here.settings
        if settings.broken_gpu or settings.late_stores:  # their tests look at tokens
            return "done", ""
        plans = [p for p in job.plans if p.planes.group == settings.flip_group and p.rows]
        if job.kind == settings.flip and plans:
            planes, row = plans[0].planes, plans[0].rows[-1]
            plane, at = planes.planes[-1], planes.slot_offsets()[-1]
            if job.kind == "store":
                job.arena[row.slot + at + (row.first + len(row.blocks)) * plane.run - 1] ^= 0x44
            else:
                place = plane.base + int(row.blocks[-1]) * plane.block_stride + plane.run - 1
                _bytes_of(memory.owners[plane.region])[place] ^= 0x44
        return check(job, holds)

    verifier.check = flipped


def _bytes_of(storage: Any) -> Any:
    """A tensor of the bytes of ``storage``, on whatever device it is."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def page_sizes() -> list[list[tuple[int, int]]]:
    """``CacheGroup.pages`` of every group, as the connector found them; none if it is inert."""
    copier = connector()._copier
    if copier is None:
        return []
    return [[(p.run, p.block_stride) for p in planes.planes] for planes in copier._planes]


def regions(connector: Any) -> list[Any]:
    """The engine's KV memory, in the order of its planes' ``region``."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * one.nbytes()).from_address(one.data_ptr()))
        for one in connector._copier._owners
    ]


def pages_of(connector: Any, blocks: Iterable[int], group: int = 0) -> list[Any]:
    """The pages of ``blocks`` in a layer group: block by block, layer by layer."""
    memory, planes = regions(connector), connector._copier._planes[group].planes
    return [
        memory[plane.region][plane.base + block * plane.block_stride :][: plane.run]
        for block in blocks
        for plane in planes
    ]


def _digests(connector: Any, groups: Iterable[Sequence[int]]) -> list[str]:
    """One digest per block, over its pages in all layers; ``groups`` are block ids by group."""
    found = []
    for group, blocks in enumerate(groups):
        for block in blocks:
            state = hashlib.sha256()
            for page in pages_of(connector, [block], group):
                state.update(page.tobytes())
            found.append(state.hexdigest())
    return found
