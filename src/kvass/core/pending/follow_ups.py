"""Follow-ups: what a change of the state leaves to be done in the same step.

Law of this file: who adds a follow-up does not know who acts on it. When the event of a step was
handled, ``CacheMachine.step`` hands the follow-ups to the functions of its table, all of a kind at
once, in the order of that table and again from its top, until none is left.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from kvass.core.rows.row_table import ClassRows


class Published(ClassRows, frozen=True):
    """Rows that engines wrote became READY."""


class Woken(msgspec.Struct, frozen=True):
    """The wait of a promotion may be over."""

    promotion: int


class FirstHit(ClassRows, frozen=True):
    """A lookup hit rows that none had hit before. It is told while ``Settlement.notes_first_hits``
    is set."""


FollowUp = Published | Woken | FirstHit


class FollowUps:
    """The follow-ups of the step in progress. ``of``: by kind, in the order in which they were
    added."""

    def __init__(self) -> None:
        self.of = defaultdict[type[FollowUp], list[FollowUp]](list)

    def add(self, follow_up: FollowUp) -> None:
        self.of[type(follow_up)].append(follow_up)
