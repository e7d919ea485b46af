"""Whether the engine loads a hit or computes it, by the rule of ``kvass.worth``.

Computing the tokens of a hit costs the time by which they make the next step longer, beside the
other tokens that it computes (``step_times.py``). The other requests of that step wait as long;
this is not counted, because the rule is about the hit's own request.

A load inside a step costs its copy (``copy_speed.py``), and what else it makes its step longer. An
asynchronous load costs the time from the allocation of its blocks to the report of its end. In an
engine that runs nothing else this is the copy and a *wait*. If other requests run, the end is
reported with one of their steps: it costs as many of these as the copy needs, and perhaps more. So
there are two estimates of a wait: seconds beyond the copy, and steps beyond those that the copy
needs. Each is the median of the last loads.

A lookup costs time, too, whatever comes of it: that of the last ones. If even a hit of all that can
be asked for would save less, the daemon is not asked.

Laws of this file:

- A hit is loaded whole as long as one of its times is unknown.
- After each lookup or load that was prevented, and each load that was cut, loads and lookups seem
  easier (``kvass.worth``), until the next load has ended. One that only for this reason seems worth
  it is a trial, and loads little. If it was as fast as it seemed, what was measured before it of
  lookups, or of waits, copies and steps with loads inside, does not count any more. A trial that
  finds nothing ends this, too.
- After a load whose copy was slow, perhaps by chance, the next hit is such a trial, if it is not
  worth a load otherwise. Else one slow copy would prevent loads for a hundred hits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final, NamedTuple

from kvass.engine.asking import Question
from kvass.engine.copy_speed import CopySpeed
from kvass.engine.hit_limits import HitLimits
from kvass.engine.in_step import InStep
from kvass.engine.observers import Observer
from kvass.engine.request_state import Answer, RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import StepTimes
from kvass.worth import EASIER, UNKNOWN_S, worth_loading

CHEAPER: Final = "cheaper_to_compute"
"""The reason that is told of a hit that is not loaded, or not whole (docs/explain.md)."""
TOO_LITTLE: Final = "too_little"
"""The reason that is told of a request for which the daemon is not asked."""
SAMPLES: Final = 8
"""How many of the last loads an estimate of a wait uses."""
LEAST: Final = 3
"""A wait is unknown until so many loads were measured: the first one may take long by chance."""
TRIAL_TOKENS: Final = 256
"""How much of a hit is loaded to measure loads anew, if a part of it can be loaded."""
FEW_CHUNKS: Final = 64
"""Lookups of more take longer by their keys, and save much. They are always asked."""
EASIEST: Final = 1e9
"""The most by which the cost of loads and lookups is divided."""
LOADING: Final = 4096
"""The most loads that are measured at a time."""


class Begun(NamedTuple):
    """A load that is measured. ``since_s``: CLOCK_MONOTONIC. ``copy_s``: what its copy takes, as
    expected. ``step_s``: the same of a step of the other requests; 0: there were none. ``most_s``:
    if it is a trial, how long it seemed to take; else 0. ``in_step``: it is inside a step."""

    since_s: float
    copy_s: float
    step_s: float
    most_s: float
    in_step: bool


class Worth(Observer):
    """The choices of one engine. Used from its scheduler's thread only.

    ``times``, ``copies``: what is known of its steps and copies. ``inside``: what fits into a step.
    ``requests``: its live requests.
    """

    def __init__(
        self,
        setup: EngineSetup,
        limits: HitLimits,
        times: StepTimes,
        inside: InStep,
        copies: CopySpeed,
        requests: Mapping[str, RequestState],
    ) -> None:
        self._on = setup.skip_slow_loads and not setup.shadow  # shadow mode checks everything
        self._groups, self._limits = setup.groups, limits
        self._cuts = setup.hits_whole_prompts
        """Whether a part of a hit can be loaded."""
        self._trial_tokens = max(TRIAL_TOKENS, setup.chunk_tokens)
        self._times, self._inside, self._copies = times, inside, copies
        self._requests = requests
        self._seconds: deque[float] = deque(maxlen=SAMPLES)
        """The waits of loads in an engine that ran nothing else."""
        self._steps: deque[float] = deque(maxlen=SAMPLES)
        """The other waits."""
        self._in_step: deque[float] = deque(maxlen=SAMPLES)
        """How much longer than its copy loads inside steps made these."""
        self._lookups: deque[float] = deque(maxlen=SAMPLES)
        """How long lookups of few chunks kept the engine."""
        self._lookup_most_s = 0.0
        """If the lookup that comes now is a trial, how long it seems to take; else 0."""
        self._easier = 1.0
        """What the cost of loads and lookups is divided by."""
        self._doubt = False
        """Whether the last copy was slow, and no trial has been made since."""
        self._trials: dict[str, float] = {}
        """By live request whose hit was weighed: if it is a trial, how long its load seems to
        take; else 0."""
        self._unasked: set[str] = set()
        """The live requests for which the daemon was not asked."""
        self._asked: set[str] = set()
        """Those for which it was asked as a trial, and has not answered yet."""
        self._loading: dict[str, Begun] = {}

    def asks(self, state: RequestState, question: Question) -> bool:
        """Whether the daemon is asked: whether a hit of all that ``question`` asks for would be
        worth the lookup."""
        name, local, most = state.request.name, question.local, question.end - question.local
        self._lookup_most_s = 0.0
        if not self._on or len(self._lookups) < LEAST:
            return True
        if (found := self._best(state, local, most, self._inside.room(local, most))) is None:
            return True
        _, seems_s, saved_s = found
        lookup_s, easier = median(self._lookups), 1.0 if self._doubt else self._easier
        if not worth_loading(lookup_s / easier, saved_s):
            if name not in self._unasked:  # the engine may ask again in each step
                self._unasked.add(name)
                self._easier = min(EASIER * self._easier, EASIEST)
            return False
        if not worth_loading(lookup_s, saved_s):
            self._lookup_most_s = lookup_s / easier
        if saved_s + seems_s < lookup_s + seems_s * self._easier:
            self._asked.add(name)
        return True

    def choose(self, state: RequestState, local: int, hit: int, in_step: int = 0) -> int:
        """How many of the ``hit`` tokens after the ``local`` ones are loaded: as many as save most
        time. ``in_step``: how many of them the engine can load inside the step."""
        if not self._on or not hit:
            return hit
        if (found := self._best(state, local, hit, in_step)) is None:
            return hit
        best, seems_s, saved_s = found
        trial = not worth_loading(seems_s * self._easier, saved_s + seems_s)
        if best and trial and self._cuts:
            best = min(best, self._limits.end_before(local + self._trial_tokens) - local)
            cost_s = self._load_s(local, local + best, self._beside(state), best <= in_step)
            seems_s = (cost_s or 0.0) / self._easier
        self._trials[state.request.name] = (best > 0 and trial) * seems_s
        return best

    def looked_up(self, chunks: int, since_s: float) -> None:
        """A lookup of ``chunks`` chunks kept the engine from ``since_s`` (CLOCK_MONOTONIC) on until
        now."""
        if chunks <= FEW_CHUNKS:
            took_s = self._times.clock() - since_s
            if took_s <= self._lookup_most_s:
                self._lookups.clear()
            self._lookups.append(took_s)

    def _best(
        self, state: RequestState, local: int, hit: int, in_step: int
    ) -> tuple[int, float, float] | None:
        """How many of the ``hit`` tokens after the ``local`` ones it saves most time to load, how
        long their load seems to take, and what it saves. Zeros: it saves nothing. None: something
        is unknown."""
        beside, best = self._beside(state), (0, 0.0, 0.0)
        for tokens in {hit, min(in_step, hit)} - {0}:
            cost_s = self._load_s(local, local + tokens, beside, tokens <= in_step)
            compute_s = self._compute_s(state.request.known_tokens - local + beside, tokens)
            if cost_s is None or compute_s == UNKNOWN_S:
                return None
            seems_s = cost_s / self._easier
            if worth_loading(seems_s, compute_s) and compute_s - seems_s >= best[2]:
                best = tokens, seems_s, compute_s - seems_s
        return best

    def _compute_s(self, all_: int, tokens: int) -> float:
        """How much longer a step of ``all_`` tokens takes than one without ``tokens`` of them."""
        whole_s = self._times.seconds(all_)
        return whole_s - self._times.seconds(all_ - tokens) if whole_s else UNKNOWN_S

    def _beside(self, state: RequestState) -> int:
        """How many other requests run. Each computes a token in the next step, or more."""
        running = (name in self._requests for name in self._times.names)
        return sum(running) - (state.request.name in self._times.names)

    def _copy_s(self, local: int, end: int) -> float | None:
        """How long the ranks copy a hit of tokens ``[local, end)``; None: unknown."""
        needed = [g.blocks(max(local, g.needs(end)), end) for g in self._groups]
        return self._copies.seconds([len(blocks) for blocks in needed])

    def _load_s(self, local: int, end: int, beside: int, in_step: bool) -> float | None:
        """What a load of tokens ``[local, end)`` costs beside so many requests; None: unknown."""
        copy_s, waits = self._copy_s(local, end), self._steps if beside else self._seconds
        if copy_s is None:
            return None
        if in_step:
            return copy_s + (median(self._in_step) if len(self._in_step) >= LEAST else 0.0)
        if len(waits) < LEAST:
            return None
        if not beside:
            return copy_s + median(waits)
        step_s = self._times.seconds(beside)
        return (_steps(copy_s, step_s) + median(waits)) * step_s

    # ------------------------------------------------------------ measuring

    def allocated(self, state: RequestState, answer: Answer, tokens: int) -> None:
        """Begin to measure a load, or note that it was prevented."""
        most_s = self._trials.pop(state.request.name, 0.0)
        if answer.why == CHEAPER:
            self._easier = min(EASIER * self._easier, EASIEST)
        if self._doubt and most_s and tokens:
            self._doubt, self._easier = False, 1.0
        if not tokens or not self._on or not self._copies.verified:
            return  # the first copies are verified, and take longer
        copy_s = self._copy_s(answer.local, answer.local + tokens)
        if copy_s is None or len(self._loading) == LOADING:
            return
        step_s = self._times.seconds(beside) if (beside := self._beside(state)) else 0.0
        begun = Begun(self._times.clock(), copy_s, step_s, most_s, state.in_step > 0)
        self._loading[state.request.name] = begun

    def loaded(self, name: str, state: RequestState | None, ok: bool) -> None:
        """Measure a load that ended."""
        if (begun := self._loading.pop(name, None)) is None or not ok:
            return
        self._doubt = self._copies.doubtful and not begun.most_s
        self._easier, took_s = self._least, self._times.clock() - begun.since_s
        waits = self._steps if begun.step_s else self._seconds
        if begun.in_step:
            self._loaded_in_step(begun)
            return
        if took_s <= begun.most_s:
            waits.clear()
            self._copies.renew()
        if begun.step_s:
            wait = took_s / begun.step_s - _steps(begun.copy_s, begun.step_s)
        else:
            wait = took_s - begun.copy_s
        waits.append(max(wait, 0.0))

    @property
    def _least(self) -> float:
        """What ``_easier`` begins with: the next hit is a trial, or none is."""
        return EASIEST if self._doubt else 1.0

    def _loaded_in_step(self, begun: Begun) -> None:
        """Measure a load inside the step that ends now. It waited for nothing, and the ranks have
        reported what its copy took."""
        if begun.most_s:
            self._copies.renew()
        if (longer_s := self._times.load_s(begun.since_s)) is None:
            return
        if longer_s <= begun.most_s:
            self._in_step.clear()
        self._in_step.append(max(longer_s - begun.copy_s, 0.0))

    def answered(self, state: RequestState, answer: Answer, first: bool) -> None:
        """End the trial if nothing was found: it measures no load."""
        name, found = state.request.name, answer.end > answer.local or answer.why == CHEAPER
        if name in self._asked and not found:
            self._easier = self._least
        self._asked.discard(name)

    def ended(self, state: RequestState) -> None:
        """Nothing of it is measured any more."""
        name = state.request.name
        self._loading.pop(name, None)
        self._trials.pop(name, None)
        self._unasked.discard(name)
        self._asked.discard(name)


def _steps(copy_s: float, step_s: float) -> int:
    """With which of the steps a copy ends that begins with the first."""
    return max(1, math.ceil(copy_s / step_s))
