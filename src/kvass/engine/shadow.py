"""The scheduler's half of shadow mode: everything is looked up, loaded and stored, but the engine
computes every token itself. So no answer depends on kvass.

Laws of this file:

- The engine is never told of a hit, and never waits for one.
- A request is looked up once: what an engine with loads would have loaded at its first lookup.
- A lease that was taken is either sent in the step's work or released.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from kvass.engine.boundary import log
from kvass.engine.observers import Observer
from kvass.engine.planner import Planner
from kvass.engine.protocols import Step
from kvass.engine.request_state import Answer, RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import SAMPLES
from kvass.engine.step_work import Compared, GroupCompared, StepWork
from kvass.layout.spans import Table
from kvass.messages import Register, Registered, ShadowGroup, ShadowReport
from kvass.types import short_name

REPORT_S: Final = 1.0
"""The shortest time between two reports to the daemon while requests run."""
LOG_S: Final = 60.0
"""How often the figures are logged while requests run."""
MIN_SAMPLE_TOKENS: Final = 64
"""Steps that compute fewer tokens of prompts are not used to estimate the speed of prefill."""
FIRST_LENGTH: Final = 1024
"""The speed is measured by position: up to this token, up to twice as many, and so on."""
UNPRICED: Final = 4096
"""How many hits may wait until the engine's speed is known. The oldest are forgotten."""
LOG_AGAIN: Final = 2.0
"""A larger difference is logged if it is this many times the one that was logged last, and wrong
rows if they are this many times as many."""


@dataclass
class ShadowHit:
    """Tokens ``[local, end)`` of a request that kvass has and the engine computes. ``checked``: the
    hit was sampled, and its match is held."""

    local: int
    end: int
    checked: bool


class SpeedByLength:
    """An estimate of how long the engine takes to compute tokens, from the times at which steps are
    planned. Tokens late in a long prompt take longer. Of each range of positions the fastest of the
    last samples counts, because idle time makes a sample too slow: the estimate errs on the low
    side. The duration of a step is the longer of the two intervals that follow it, because with
    asynchronous scheduling the next step is planned at once."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=3)
        self._speeds: dict[int, deque[float]] = {}
        """Tokens per second of the last samples, by range of positions."""

    def step(self, tokens: int, position: float, now_s: float) -> None:
        """A step is planned at ``now_s`` (CLOCK_MONOTONIC). It computes ``tokens`` tokens; those of
        prompts are at ``position`` on average. ``tokens`` is 0 if too few are of prompts."""
        self._steps.append((now_s, tokens, position))
        if len(self._steps) == 3:
            (first, computed, where), (second, _, _), (third, _, _) = self._steps
            took_s = max(second - first, third - second)
            if computed and took_s > 0:
                samples = self._speeds.setdefault(_range_of(int(where)), deque(maxlen=SAMPLES))
                samples.append(computed / took_s)

    def idle(self, now_s: float) -> None:
        """The last step has ended, and no request is left. So the time until the next step is not
        taken for its duration."""
        for _ in range(2):
            self.step(0, 0.0, now_s)

    @property
    def known(self) -> bool:
        """Whether a speed was measured."""
        return bool(self._speeds)

    def seconds(self, begin: int, end: int) -> float:
        """How long computing tokens ``[begin, end)`` of a prompt takes. For a range that was not
        measured the nearest one counts. A speed must be ``known``."""
        total = 0.0
        while begin < end:
            number = _range_of(begin)
            upto = min(end, FIRST_LENGTH << number)
            nearest = min(self._speeds, key=lambda known: (abs(known - number), known))
            total += (upto - begin) / max(self._speeds[nearest])
            begin = upto
        return total


def _range_of(position: int) -> int:
    """The number of the range of positions: 0 below ``FIRST_LENGTH``."""
    return (position // FIRST_LENGTH).bit_length()


class ShadowLookups(Observer):
    """Counts the lookups in the figures of shadow mode."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow

    def allocated(self, state: RequestState, answer: Answer, tokens: int) -> None:
        """Count the lookup, and what matched although it is not loaded."""
        hit = answer.end - answer.local
        self._shadow.count(lookups=1, lookup_tokens=answer.asked, hit_tokens=hit)


class Shadow:
    """Shadow mode of one engine. It calls ``planner``. Used from the scheduler's thread only."""

    def __init__(self, setup: EngineSetup, planner: Planner) -> None:
        self._setup, self._planner = setup, planner
        self._client = planner.client
        self._share = 0.0
        """The fractions of checks that were left over by sampling."""
        self._waiting: dict[str, int] = {}
        """Requests that got blocks before their lookup was answered: their local tokens."""
        self._hits: dict[str, ShadowHit] = {}
        self._answered: set[str] = set()
        """Live requests that were looked up."""
        self._unpriced: deque[tuple[int, int]] = deque(maxlen=UNPRICED)
        """Hits of requests that ended before the engine's speed was known."""
        self._speed = SpeedByLength()
        self._live: set[str] = set()
        groups = tuple(ShadowGroup() for _ in setup.groups)
        self.report = ShadowReport(sampled=setup.shadow, groups=groups)
        """The figures since the start."""
        self._logged_difference = [0.0] * len(groups)
        self._logged_wrong = [0] * len(groups)
        self._changed = False
        self._reported_s = float("-inf")  # the daemon learns of the mode in the first step
        self._logged_s = time.monotonic()
        self._logged_lookups = 0
        self.lookups = ShadowLookups(self)
        """Let it observe the requests of ``planner``."""

    def count(self, **figures: float) -> None:
        """Add to these figures of the report, and to the engine's own."""
        self._changed = True
        for name, number in figures.items():
            setattr(self.report, name, getattr(self.report, name) + number)
            own = f"shadow_{name.removesuffix('_s')}{'_seconds' * name.endswith('_s')}"
            self._planner.traffic.count(own, number)

    # ------------------------------------------------------------ requests

    def track(self, name: str) -> None:
        """A request begins."""
        self._live.add(name)

    def match(self, name: str, local: int) -> None:
        """Look up a request of which the engine's own cache has ``local`` tokens."""
        if name in self._answered:
            return
        late = name in self._waiting  # it was preempted, or got no blocks yet
        match = self._planner.look_up_late if late else self._planner.match
        self._note(name, local, match(name, local))

    def _note(self, name: str, local: int, hit: int | None) -> None:
        if hit is None:
            self._waiting[name] = local
            return
        self._waiting.pop(name, None)
        self._answered.add(name)
        if hit:
            self._hits[name] = ShadowHit(local, local + hit, self._sampled())
            if not self._hits[name].checked:
                self._client.give_back(name)

    def allocated(self, name: str) -> None:
        """The engine allocated the request's blocks, and computes all of it."""
        self._planner.got_blocks(name)

    def forget(self, name: str) -> None:
        """A request ended."""
        self._live.discard(name)
        if not self._live:
            self._speed.idle(time.monotonic())
        self._answered.discard(name)
        self._waiting.pop(name, None)
        hit = self._hits.pop(name, None)
        if hit is not None:
            if hit.checked:
                self.count(not_compared=1)
            self._unpriced.append((hit.local, hit.end))
        self._price()

    def _sampled(self) -> bool:
        """Whether the next hit is loaded and compared."""
        self._share += self._setup.shadow
        if self._share < 1:
            return False
        self._share -= 1
        return True

    def _price(self) -> None:
        """Count the time of hits whose tokens the engine has computed."""
        while self._unpriced and self._speed.known:
            self.count(saved_s=self._speed.seconds(*self._unpriced.popleft()))

    # ------------------------------------------------------------ a step

    def plan(self, step: Step, work: StepWork) -> None:
        """Add to ``work`` the checks of hits that the step computes to their end. Call it after
        ``Planner.plan`` and before ``Planner.hand_over``."""
        now_s = time.monotonic()
        self._note_speed(step, now_s)
        for name, local in list(self._waiting.items()):
            if name in step.names:
                self._note(name, local, self._planner.look_up_late(name, local))
        if self._hits:
            for name, tokens in step.requests():
                hit = self._hits.get(name)
                if hit is not None and hit.checked:
                    self._check(name, hit, tokens, step, work)
        self._say(now_s)

    def _note_speed(self, step: Step, now_s: float) -> None:
        tokens, weighted = 0, 0.0
        if step.tokens >= MIN_SAMPLE_TOKENS:
            for name, count in step.requests():
                begin = self._planner.computed_tokens(name)
                if count > 1 and begin is not None:
                    tokens += count
                    weighted += count * (begin + count / 2)
        enough = tokens >= MIN_SAMPLE_TOKENS
        self._speed.step(step.tokens if enough else 0, weighted / tokens if enough else 0.0, now_s)

    def _check(self, name: str, hit: ShadowHit, tokens: int, step: Step, work: StepWork) -> None:
        """Plan the check of a hit, if this step computes its last token, or has done so."""
        before = self._planner.computed_tokens(name)
        if before is None or before + tokens < hit.end:
            return
        hit.checked = False
        table = self._at_end(step.block_table(name), hit, before + tokens)
        check = self._planner.check(name, table, hit.end, work)
        if check is None:
            self.count(not_compared=1)
        else:
            work.checks.append(check)

    def _at_end(self, table: Table, hit: ShadowHit, computed: int) -> Table:
        """``table`` without the states, unless they are those after the hit's last token."""
        if computed == hit.end:
            return table
        return [
            [0] * len(ids) if group.rules.summary else ids
            for group, ids in zip(self._setup.groups, table, strict=True)
        ]

    # ------------------------------------------------------------ results

    def compared(self, results: Iterable[Compared]) -> None:
        report, traffic = self.report, self._planner.traffic
        for result in results:
            if result.error:
                self.count(not_compared=result.rank == 0)
                continue
            self.count(loads=1, load_bytes=result.load_bytes, load_s=result.load_s)
            found = [one for one in result.groups if one is not None]
            traffic.count("shadow_differing_rows", sum(one.differing_rows for one in found))
            traffic.count("shadow_wrong_rows", sum(one.wrong_rows for one in found))
            report.groups = tuple(
                self._group(number, known, found, result)
                for number, (known, found) in enumerate(
                    zip(report.groups, result.groups, strict=True)
                )
            )
        self._say(time.monotonic())

    def _group(
        self, number: int, known: ShadowGroup, found: GroupCompared | None, result: Compared
    ) -> ShadowGroup:
        """The figures of a group with those that a rank found."""
        if found is None:
            return msgspec.structs.replace(known, not_compared=known.not_compared + 1)
        worse = found.largest_difference > known.largest_difference
        wrong = known.wrong_rows + found.wrong_rows
        if found.wrong_rows and wrong >= LOG_AGAIN * self._logged_wrong[number]:
            self._logged_wrong[number] = wrong
            row = self._difference(number, *found.worst_wrong, result)
            log.warning("%s: see docs/wrong-tokens.md", row)
        elif found.largest_difference > LOG_AGAIN * self._logged_difference[number]:
            self._logged_difference[number] = found.largest_difference
            worst = found.largest_difference, found.at_value, found.chunk
            log.info("%s", self._difference(number, *worst, result))
        return ShadowGroup(
            rows=known.rows + found.rows,
            bytes=known.bytes + found.bytes,
            differing_rows=known.differing_rows + found.differing_rows,
            largest_difference=max(known.largest_difference, found.largest_difference),
            at_value=found.at_value if worse else known.at_value,
            not_compared=known.not_compared,
            wrong_rows=wrong,
        )

    def _difference(
        self, number: int, difference: float, value: float, chunk: int, result: Compared
    ) -> str:
        """A difference in a layer group, and its row."""
        return (
            f"shadow mode: loaded KV differs from computed KV by up to {difference:.3g}, at a "
            f"value of {value:.3g}: namespace {self._namespace() or 'unknown'}, group {number} "
            f"({self._setup.groups[number].kind}), chunk {chunk} of request "
            f"{short_name(result.request)}, rank {result.rank}"
        )

    def _namespace(self) -> str:
        """The digest of the engine's namespace in hex; empty if the daemon does not answer in this
        step. A repeated registration is answered with it."""
        registration: Register | None = self._client.registration
        if registration is None:
            return ""
        seq = self._client.submit(msgspec.structs.replace(registration, seq=0))
        reply = self._client.wait_in_step(seq) if seq else None
        if isinstance(reply, Registered):
            return reply.namespace.hex()
        if seq and reply is None:
            self._client.discard(seq)
        return ""

    # ------------------------------------------------------------ what is shown

    def _say(self, now_s: float) -> None:
        """Send the figures to the daemon and log them, if they have changed and it is time."""
        idle = not self._live and not self._planner.storing()
        if self._changed and (idle or now_s - self._reported_s >= REPORT_S):
            self._reported_s = now_s
            sent = self._client.report_shadow(msgspec.structs.replace(self.report, seq=0))
            self._changed = not sent
        if now_s - self._logged_s >= LOG_S and self.report.lookups > self._logged_lookups:
            self._logged_s, self._logged_lookups = now_s, self.report.lookups
            log.info("%s", self.summary())

    def close(self) -> None:
        """Send and log the figures for the last time."""
        if self._changed:
            self._client.report_shadow(msgspec.structs.replace(self.report, seq=0))
        if self.report.lookups:
            log.info("%s", self.summary())

    def summary(self) -> str:
        """The figures in one line."""
        report = self.report
        share = 100 * report.hit_tokens / max(1, report.lookup_tokens)
        groups = ", ".join(
            f"group {number} ({layout.kind}) {group.largest_difference:.3g}"
            + (f", wrong rows: {group.wrong_rows}" if group.wrong_rows else "")
            + (f", {group.not_compared} not compared" if group.not_compared else "")
            for number, (layout, group) in enumerate(
                zip(self._setup.groups, report.groups, strict=True)
            )
        )
        return (
            f"shadow mode: kvass has {report.hit_tokens:,} of {report.lookup_tokens:,} looked-up "
            f"tokens ({share:.1f} %); computing them took {report.saved_s:.1f} s; {report.loads} "
            f"loads of {report.load_bytes >> 20} MiB took {report.load_s:.2f} s; largest "
            f"difference: {groups}; {report.not_compared} hits not compared"
        )
