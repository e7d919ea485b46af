"""An engine without a model over a real daemon, its KV tensors on a device, hook by hook.

Law of this file: the classes are those that the connector uses (``SchedulerClient``,
``WorkerClient``, ``plan_copy``, ``CudaMover``), called in the orders of vLLM 0.32's model runners;
nothing waits for the device in between. What a hook does is asked on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvass.cli.bench.geometries import geometry as named
from kvass.client.parallel import ParallelStrategy
from kvass.client.worker import WorkerClient
from kvass.messages import Register
from kvass.testing.fake_engine import FakeEngine
from kvass.testing.fake_rank import FakeRank, Transfer
from kvass.transfer.cuda import CudaMover
from kvass.types import RankLayout
from tests.gpu.device import Device
from tests.gpu.kv import KvMemory, on
from tests.gpu.rig import NEVER_KERNEL

ORDERS: Final[dict[str, tuple[str, ...]]] = {
    # Loads are asynchronous, so both runners begin them after the forward pass.
    "v1": ("preemptions", "zero", "forward", "draft", "load", "save", "results"),
    "v1 with a drafter": ("preemptions", "zero", "forward", "load", "results", "draft", "save"),
    "v2": ("zero", "preemptions", "forward", "draft", "load", "save", "results"),
    # Steps that also have synchronous loads, of another connector under MultiConnector.
    "v1, loads first": ("preemptions", "zero", "load", "forward", "draft", "save", "results"),
    "v2, loads first": ("zero", "preemptions", "load", "forward", "draft", "save", "results"),
}
CARELESS: Final[dict[str, tuple[str, ...]]] = {
    "loads before zeroing": ("load", "wait", "zero", "forward", "draft", "save", "results"),
    "stores before the drafter": ("zero", "forward", "save", "wait", "draft", "load", "results"),
    "blocks reused before poll": (
        "zero", "forward", "draft", "load", "save", "reuse", "wait", "results",
    ),
}  # fmt: skip
"""Controls: runners, and one scheduler, that break what a mover relies on."""


class DeviceRank(FakeRank):
    """A rank whose KV memory is on a device."""

    def __init__(self, socket: str, terms: Register, kv: KvMemory, mover: CudaMover) -> None:
        self.rank, self.alive = terms.rank, True
        self.memory = self.kv = kv
        self.mover = mover
        self.client = WorkerClient(socket, terms)
        self.client.start()

    def copy(self, what: Transfer) -> None:
        with self.kv.device.engine():
            super().copy(what)


class DeviceEngine(FakeEngine):
    """An engine of one rank of the geometry ``name`` on ``device``, with ``rows`` rows' blocks.

    Engines of one geometry share a namespace. ``step`` is what a model runner does.
    """

    def __init__(
        self, socket: str, device: Device, name: str, *, rows: int = 12, seed: int = 0, **more: Any
    ) -> None:
        self.device, self.geometry = device, on(device, named(name))
        self._more: dict[str, Any] = {"kernel_below": NEVER_KERNEL, **more}
        self.flying = list[Transfer]()
        chunk = self.geometry.chunk_tokens
        super().__init__(
            socket,
            ParallelStrategy(),
            [RankLayout(self.geometry.groups)],
            chunk_tokens=chunk,
            identity={"model": name, "device": device.where},
            blocks=self.geometry.blocks(rows * chunk),
            seed=seed,
        )
        widths = [group.row_blocks(chunk) for group in self.geometry.groups]
        ids = 1 + np.random.default_rng(seed).permutation(self.blocks - 1)
        ends = np.cumsum([rows * width for width in widths])[:-1]
        self._free = np.split(ids, ends)  # groups share their memory: a block is one group's

    def _new_rank(self, rank: int) -> DeviceRank:
        terms = self.world.at(rank).register(
            self.instance, self.identity, self.chunk_tokens, self.layouts[0]
        )
        kv = KvMemory(self.device, self.geometry, self.blocks)
        runtime = self._more.pop("runtime", self.device.runtime)
        return DeviceRank(
            self.socket, terms, kv, CudaMover(runtime, [kv.region], kv.planes, **self._more)
        )

    @property
    def kv(self) -> KvMemory:
        """The rank's tensors."""
        (rank,) = self.ranks
        assert isinstance(rank, DeviceRank)
        return rank.kv

    def room(self, rows: int) -> bool:
        """Whether blocks are left for so many rows."""
        widths = [group.row_blocks(self.chunk_tokens) for group in self.geometry.groups]
        return all(
            rows * width <= len(free) for width, free in zip(widths, self._free, strict=True)
        )

    def verify(self) -> int:
        """As ``FakeEngine.verify``, of what moved."""
        right = 0
        for what, _ in self._loaded:
            right += self.kv.verify(what.keys, what.moving)
            self._give_blocks(what.tables)
        self._loaded.clear()
        return right

    # ------------------------------------------------------------ a step

    def reserve(self, prompt: Sequence[int]) -> Transfer | None:
        """As ``FakeEngine.reserve``, and handed over."""
        return self._handed_over(super().reserve(prompt))

    def match(self, prompt: Sequence[int]) -> Transfer | None:
        """As ``FakeEngine.match``, and handed over. Of a window or a state the last rows move."""
        what = super().match(prompt)
        if what is not None:
            every = range(len(what.keys))
            what.which = tuple(tuple(every[len(every) - len(slots) :]) for slots in what.slots)
        return self._handed_over(what)

    def _handed_over(self, what: Transfer | None) -> Transfer | None:
        assert what is None or self.hand_over(what), "the daemon is gone"
        return what

    def step(self, order: tuple[str, ...], work: list[Transfer]) -> list[Transfer]:
        """Carry out the step that ``work`` was planned for; what is over now of all that flies.

        Blocks that nobody holds are rewritten all the time, as by requests that store nothing.
        """
        self.flying += work
        over: list[Transfer] = []
        for hook in order:
            if hook == "results":
                over = self._results()
            else:
                getattr(self, f"_{hook}")(work)
        return over

    def _preemptions(self, work: list[Transfer]) -> None:
        """``handle_preemptions``: here ours does nothing, since blocks are held."""

    def _zero(self, work: list[Transfer]) -> None:
        self.kv.zero()

    def _forward(self, work: list[Transfer]) -> None:
        self.kv.forward()
        for kernel in self.kv.fills(self._free, 0xDD):
            self.device.queue(kernel)

    def _draft(self, work: list[Transfer]) -> None:
        self.kv.draft()

    def _load(self, work: list[Transfer]) -> None:
        """``start_load_kv``."""
        for what in work:
            if what.kind == "load":
                self.copy(what)

    def _save(self, work: list[Transfer]) -> None:
        """``wait_for_save``."""
        for what in work:
            if what.kind == "store":
                self.copy(what)

    def _results(self) -> list[Transfer]:
        """``get_transfer_results`` and ``build_connector_worker_meta``."""
        over = [what for what in self.flying if set(what.ranks) <= what.outcomes.keys()]
        self.flying = [what for what in self.flying if what not in over]
        return over

    # ------------------------------------------------------------ what careless ones do

    def _wait(self, work: list[Transfer]) -> None:
        assert self.ranks[0].mover.drain(60)

    def _reuse(self, work: list[Transfer]) -> None:
        for what in work:
            if what.kind == "store":
                for kernel in self.kv.fills(what.tables, 0xCC):
                    self.device.queue(kernel)
