"""The work of a step: the loads and stores that the scheduler sends to the workers.

All are plain values, which the engine's own messages carry. Block ids and slots are tuples, indexed
by layer group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    granted, and if it holds ``adapter``. ``trace`` is as in ``protocols.Request``.

    ``in_step``: the ids of all blocks that are wrong if a load inside the step fails; empty: the
    load is asynchronous."""

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
    in_step: tuple[int, ...] = ()


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


@dataclass(frozen=True)
class ShadowCheck:
    """A check of shadow mode, after the forward pass of the step: load the rows of ``load`` into
    scratch memory and compare them with its blocks, which the engine computed itself. ``step``,
    ``computed`` and ``first_step`` are as in ``Store``. A group that cannot be compared has no
    blocks. ``chunks``: the chunk at whose end the rows of the hit end."""

    step: int
    load: Load
    chunks: int
    computed: int
    first_step: int = 0


def comparable(load: Load, most: int, row_blocks: Sequence[int]) -> Load:
    """The part of ``load`` that a check can compare, with at most ``most`` blocks: the last rows of
    each group. A group has no blocks if one of them was freed or may change. ``row_blocks``: how
    many blocks a row of each group has; the last row may have fewer."""
    blocks, slots, skips = list(load.blocks), list(load.slots), list(load.skip)
    share = most // max(1, len(blocks))
    for group, (ids, rows, skip) in enumerate(zip(load.blocks, load.slots, load.skip, strict=True)):
        each = row_blocks[group]
        kept = min(len(rows), share // max(1, each))
        if not all(ids[skip:]) or not kept:
            blocks[group], skips[group] = (), 0
        elif kept < len(rows):
            dropped = (len(rows) - kept) * each
            blocks[group], slots[group], skips[group] = ids[dropped:], rows.last(kept), 0
    return replace(load, blocks=tuple(blocks), slots=tuple(slots), skip=tuple(skips))


@dataclass(frozen=True)
class GroupCompared:
    """What a rank found in one layer group of a check: ``rows`` rows of ``bytes`` bytes were
    compared. ``differing_rows`` of them were not equal to the last bit. ``largest_difference``:
    between a loaded value and the computed one, whose magnitude is ``at_value``. It is in the row
    of ``chunk``. ``wrong_rows``: those with a difference as large as the values themselves.
    ``worst_wrong``: the largest of these differences, the value and the chunk."""

    rows: int = 0
    bytes: int = 0
    differing_rows: int = 0
    largest_difference: float = 0.0
    at_value: float = 0.0
    chunk: int = -1
    wrong_rows: int = 0
    worst_wrong: tuple[float, float, int] = (0.0, 0.0, -1)


@dataclass(frozen=True)
class Compared:
    """A rank's result of a check. ``groups``: by layer group; None for a group that was not
    compared. ``error``: why the rows were not loaded; empty if they were. ``load_s``: how long the
    load of ``load_bytes`` bytes took."""

    request: str
    rank: int
    load_bytes: int = 0
    load_s: float = 0.0
    groups: tuple[GroupCompared | None, ...] = ()
    error: str = ""


@dataclass
class StepWork:
    """The loads, stores and checks of one step. ``step`` counts the steps that have stores or
    checks, from 1, and is 0 in a step without them. Their blocks are held until every rank has
    reported ``step``. ``number`` counts all steps. ``computes``: the step has a forward pass.
    ``emptied``: the engine's own prefix cache was emptied since the step before. ``recovered``:
    the engine has forgotten what it computed with failed loads inside steps up to this number."""

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    checks: list[ShadowCheck] = field(default_factory=list)
    number: int = 0
    computes: bool = True
    emptied: bool = False
    recovered: int = 0

    def leased(self) -> list[Load]:
        """The loads that have a lease, those of checks, too."""
        return [load for load in (*self.loads, *(c.load for c in self.checks)) if load.lease]

    def lent(self) -> tuple[list[int], list[int], set[bytes]]:
        """What the daemon lent for this step: leases, reservations, and by which of its boots."""
        loads = self.leased()
        boots = {load.boot for load in loads} | {store.boot for store in self.stores}
        return [load.lease for load in loads], [s.reservation for s in self.stores], boots
