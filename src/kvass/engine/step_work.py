"""The work of a step: the loads and stores that the scheduler sends to the workers.

All are plain values, which the engine's own messages carry. Block ids and slots are tuples, indexed
by layer group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvass.layout.spans import Blocks
from kvass.types import Slots


@dataclass(frozen=True)
class AdapterHeld:
    """A LoRA adapter that the ranks must hold. Under the engine's id ``name``, rank ``r`` must hold
    the weights with the digest ``digests[r]``. With ``expected``, a rank may also hold nothing
    under this id: it will read the adapter from its files."""

    name: int
    digests: tuple[str, ...]
    expected: bool = False


@dataclass(frozen=True)
class Load:
    """A load: rows to copy into the blocks of one waiting request. The first ``skip[g]`` blocks of
    the first row of group ``g`` are not copied. If ``blocks[g]`` end inside the last row, the rest
    of that row is not copied. If ``lease`` is 0, there is nothing to read, and the load must be
    reported as failed. A rank copies only if it was registered at ``given_s``, when the lease was
    granted, and if it holds ``adapter``. ``trace`` is as in ``protocols.Request``."""

    kind: ClassVar[Literal["load"]] = "load"
    request: str
    boot: bytes = b""
    lease: int = 0
    given_s: float = 0.0
    deadline_s: float = 0.0
    slots: tuple[Slots, ...] = ()
    blocks: Blocks = ()
    skip: tuple[int, ...] = ()
    trace: str = ""
    adapter: AdapterHeld | None = None


@dataclass(frozen=True)
class Store:
    """A store: blocks to copy into granted rows, after the forward pass of the step. ``step`` is
    ``StepWork.step``. ``computed`` is the ``StepWork.number`` of the step that computed the blocks;
    it is an earlier step if the grant came late. ``slots[g]`` and ``blocks[g]`` may be empty. If
    ``blocks[g]`` end inside the last row, that row is a tail. ``request`` and ``trace`` are for
    spans. A rank copies only if it has held ``adapter`` since ``first_step``, the first step that
    computed tokens of the request."""

    kind: ClassVar[Literal["store"]] = "store"
    step: int
    boot: bytes
    reservation: int
    given_s: float
    deadline_s: float
    slots: tuple[Slots, ...]
    blocks: Blocks
    computed: int = 0
    request: str = ""
    trace: str = ""
    adapter: AdapterHeld | None = None
    first_step: int = 0


@dataclass
class StepWork:
    """The loads and stores of one step. ``step`` counts the steps that have stores, from 1, and is
    0 in a step without stores. The blocks of the stores are held until every rank has reported
    ``step``. ``number`` counts all steps. ``computes``: the step has a forward pass. ``emptied``:
    the engine's own prefix cache was emptied since the step before."""

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    number: int = 0
    computes: bool = True
    emptied: bool = False
