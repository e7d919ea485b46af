"""What ranks report to the scheduler, and a rank's loads that have ended until it does.

Law of this file: after a load inside a step failed, ``first_bad_step`` is that step, until the
scheduler says that the step is taken back. Nothing is stored that it or a later step computed.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Self

from kvass.client.reached import RankNews
from kvass.engine.copy_speed import Copied
from kvass.engine.held_adapters import News
from kvass.engine.step_work import Compared, Load

NEVER: Final = sys.maxsize
"""A step number that is never reached."""


@dataclass
class RankReport:
    """What one rank reports, or several. ``steps[s]``: how many ranks have ended the last store of
    step ``s`` (``StepWork.step``). ``adapters``: by rank, what it holds under each LoRA adapter id
    that changed. ``compared``: the checks that ended. ``wrong``: the copies that verification found
    wrong. ``copied``: by rank, the loads that ended well. ``in_step``: which loads inside steps
    ended, and whether well on all ranks. ``failed_step``: the last step of one that failed; 0: none
    did. ``daemons``: by rank, what is new of its daemon (``node_rank.py``)."""

    steps: dict[int, int] = field(default_factory=dict)
    adapters: dict[int, News] = field(default_factory=dict)
    compared: list[Compared] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    copied: dict[int, Copied] = field(default_factory=dict)
    in_step: dict[str, bool] = field(default_factory=dict)
    failed_step: int = 0
    daemons: dict[int, RankNews] = field(default_factory=dict)

    def aggregate(self, other: Self) -> Self:
        """What the ranks of both report."""
        ended = self.in_step.keys() | other.in_step.keys()
        every = self.in_step, other.in_step
        return type(self)(
            dict(Counter(self.steps) + Counter(other.steps)),
            self.adapters | other.adapters,
            self.compared + other.compared,
            self.wrong + other.wrong,
            self.copied | other.copied,
            {name: all(one.get(name, True) for one in every) for name in ended},
            max(self.failed_step, other.failed_step),
            self.daemons | other.daemons,
        )


class EndedLoads:
    """The loads of one rank that have ended and that no report has. Used from the worker's
    engine thread only."""

    def __init__(self) -> None:
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._in_step: dict[str, bool] = {}
        """The loads inside steps, and whether they ended well."""
        self._bad_blocks: set[int] = set()
        """The blocks of those that failed and that the engine was not told."""
        self._failed_steps: list[int] = []
        """The steps with such loads that are not taken back, in order."""
        self._copied = 0, 0.0

    @property
    def finished(self) -> bool:
        """Whether an asynchronous load has ended since ``take``."""
        return bool(self._finished)

    @property
    def first_bad_step(self) -> int:
        """The first step whose load failed and that is not taken back; ``NEVER``: there is none."""
        return self._failed_steps[0] if self._failed_steps else NEVER

    def add(self, load: Load, ok: bool, step: int) -> None:
        """A load of step ``step``, if it is inside a step, ended, and whether well."""
        if not load.in_step:
            self._finished.add(load.request)
            if not ok:
                self._failed.add(load.request)
            return
        self._in_step[load.request] = ok
        if not ok:
            self._bad_blocks.update(load.in_step)
            self._failed_steps.append(step)

    def add_copied(self, size: int, seconds: float) -> None:
        """A load of ``size`` bytes ended well; one thread copies that in ``seconds``."""
        had, took_s = self._copied
        self._copied = had + size, took_s + seconds

    def taken_back(self, step: int) -> None:
        """The engine forgets what the steps up to ``step`` computed with failed loads."""
        self._failed_steps = [number for number in self._failed_steps if number > step]

    def take(self) -> tuple[set[str], set[str]]:
        """The requests whose asynchronous load ended since the last call, and those of them whose
        load failed."""
        taken = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return taken

    def take_in_step(self) -> tuple[dict[str, bool], int]:
        """The loads inside steps that ended since the last call, and whether well; and the last
        step of one that failed, 0 if none did."""
        taken, self._in_step = self._in_step, {}
        return taken, 0 if all(taken.values()) else self._failed_steps[-1]

    def take_bad_blocks(self) -> set[int]:
        """The ids of the blocks that could not be loaded inside a step, since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_copied(self) -> tuple[int, float]:
        """The bytes of the loads that ended well since the last call, and how long one thread
        copies them, in seconds."""
        copied, self._copied = self._copied, (0, 0.0)
        return copied
