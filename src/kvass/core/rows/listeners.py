"""What becomes of rows, told once to all that follow them.

Law of this file: a row that has entered leaves once. Either ``left`` is told of it, with its class
and the cause; or its class is removed first (``gone``), and ``reclaimed`` is told when the slot of
the row becomes free.

Who tells guarantees this:

- There is at least one of ``rows``, and all are of one class.
- They are distinct and in one state, except those of ``used``: who names a chunk twice uses its row
  twice.
- ``entered``, ``readable`` and ``used`` are told when the table has the change, ``left``, ``gone``
  and ``reclaimed`` before it has it. So the key of each row is in the table.
- Adopted rows do not enter: ``adoption.py`` lists them in the index and the order of their class.
- Listeners hear of a change in the order of the tuple, inside the step of the core.

A listener does its part at once, in bulk. It changes nothing but its own columns, and no row's
state. A hook that a class of listeners does not override costs nothing.
"""

from __future__ import annotations

import msgspec

from kvass.core.rows.causes import Cause, ClearCause
from kvass.core.rows.row_class import RowClass
from kvass.types import I64Array, U64Array


class Entered(msgspec.Struct, frozen=True, gc=False):
    """Rows that have a slot and a key now: WRITING or LOADING. ``session``: the tag of the client's
    session that stores them; 0: it is not known."""

    row_class: RowClass
    rows: I64Array
    session: int


class Readable(msgspec.Struct, frozen=True, gc=False):
    """Rows that became READY or TRANSIENT."""

    row_class: RowClass
    rows: I64Array


class Used(msgspec.Struct, frozen=True, gc=False):
    """Rows that were used, and their new ``stamps``, ascending. ``session``: as of
    ``RowStates.touch``."""

    row_class: RowClass
    rows: I64Array
    stamps: I64Array
    session: int | None
    now: float


class Left(msgspec.Struct, frozen=True, gc=False):
    """Rows that no lookup finds from now on, their ``keys``, and the ``state`` in which all of them
    were.

    ``own``: they made room for their own tenant, which may have no more. ``orphaned``: they were
    windows and states, evicted with the ``full`` row that they need.
    """

    row_class: RowClass
    rows: I64Array
    keys: U64Array
    state: int
    cause: Cause
    now: float
    own: bool = False
    orphaned: bool = False


class ClassesGone(msgspec.Struct, frozen=True, gc=False):
    """All rows of ``namespaces``, of which ``classes`` are removed. ``sets``: the extent sets of
    these classes. Classes that had no rows stay."""

    namespaces: list[int]
    classes: list[RowClass]
    sets: I64Array
    cause: ClearCause


class Listener:
    """Follows rows. Every hook does nothing unless it is overridden."""

    def entered(self, told: Entered) -> None:
        """Rows were allocated."""

    def readable(self, told: Readable) -> I64Array | None:
        """Rows may be read now. Returns rows of the same namespace and group that they replace:
        READY ones, which leave."""

    def used(self, told: Used) -> None:
        """Rows were used."""

    def left(self, told: Left) -> None:
        """Rows are leaving L1. Their slots may be in use for a while yet."""

    def gone(self, told: ClassesGone) -> None:
        """Namespaces are cleared or removed. There may be a million rows: look at none of them."""

    def reclaimed(self, rows: I64Array) -> None:
        """The slots of ``rows`` become free. Their classes were removed before; their sets have not
        been given back."""


class Listeners:
    """The hooks of all listeners, of each hook those that override it."""

    def __init__(self, *every: Listener) -> None:
        none = Listener
        self.entered = tuple([x.entered for x in every if type(x).entered is not none.entered])
        self.readable = tuple([x.readable for x in every if type(x).readable is not none.readable])
        self.used = tuple([x.used for x in every if type(x).used is not none.used])
        self.left = tuple([x.left for x in every if type(x).left is not none.left])
        self.gone = tuple([x.gone for x in every if type(x).gone is not none.gone])
        self.reclaimed = tuple(
            [x.reclaimed for x in every if type(x).reclaimed is not none.reclaimed]
        )
