"""What the core asks of a tier, done by threads, in a process of the tier's own (``tier_host``).

Law of this file: ``submit`` never blocks and never raises for a tier's trouble, and every effect
is ended by exactly one event. A tier that is dead, slow or broken costs itself alone: its records
are misses, at once, until it serves again.

A tier has four *lanes*, each with threads and a breaker of its own, so that no probe queues behind
bulk loads, no load behind stores, and a disk that has become read-only still serves. Questions for
epochs have one thread: between reading a note and setting it no other one is set. (Their breaker is
that of probes, which are asked more often, so that a tier is soon seen to be back.) What the tier
raises opens its lane's breaker. A call that runs for too long, unless it is a clear, shuts all
lanes until it returns: what is queued falls out, what runs cannot be taken back. A further thread
watches for that, says when a tier goes down or is back, and reports; it sleeps while nothing
happens.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from kvass.core.effects import (
    FromTier,
    TierClear,
    TierEpoch,
    TierLoad,
    TierProbe,
    TierReport,
    ToTier,
)
from kvass.daemon.breaker import Breaker
from kvass.daemon.lane import Lane
from kvass.daemon.operations import fall_out, perform
from kvass.errors import TierDown
from kvass.tiers.base import Buffer, Tier
from kvass.tiers.url import shown

ASK, NOTE, LOAD, STORE = "ask", "note", "load", "store"
_THREADS: Final = {ASK: 2, NOTE: 1, LOAD: 4, STORE: 2}
_NICE: Final = {ASK: 0, NOTE: 0, LOAD: 5, STORE: 10}
"""Bulk work gives way to what answers engines, and to engines."""
ROOM: Final = 1024
"""Effects that may wait in a lane."""
SLOW_S: Final = 10.0
_REPORT_S: Final = 1.0
_POLL_S: Final = 0.005
_WORDS: Final = 200
_log = logging.getLogger("kvass.tiers")

Post = Callable[[FromTier | TierReport], None]
Clock = Callable[[], float]


class Executor:
    """Carries out ``ToTier`` effects on one tier; ``post`` is called with their ends, from any
    thread. ``number`` is the tier's in the core, ``name`` for people; ``arena`` the whole of it.
    """

    def __init__(
        self,
        number: int,
        tier: Tier,
        name: str,
        arena: Buffer,
        post: Post,
        *,
        slow_s: float = SLOW_S,
        room: int = ROOM,
        clock: Clock = time.monotonic,
    ) -> None:
        self._number, self._tier, self._name = number, tier, name
        self._arena, self._post, self._slow_s, self._clock = arena, post, slow_s, clock
        label = f"kvass-tier{number}"
        self._lanes = {
            kind: Lane(f"{label}-{kind}", threads, room, self._work, clock, _NICE[kind])
            for kind, threads in _THREADS.items()
        }
        self._lock = threading.Lock()
        """Guards what follows, and is held for no longer than it takes to change it."""
        self._breakers = {kind: Breaker() for kind in _THREADS}
        self._breakers[NOTE] = self._breakers[ASK]  # notes are asked for so rarely
        self._errors = self._refused = 0
        self._trouble = ""
        self._seen: set[type[BaseException]] = set()
        self._shut = False
        self._up = True
        self._told: dict[str, Any] = {}
        self._stirred, self._turned = threading.Event(), threading.Event()
        self._registering_since: float | None = None
        register = getattr(tier, "register_memory", None)
        if register is not None:
            self._registering_since = clock()
            threading.Thread(target=self._register, args=(register,), daemon=True).start()
        else:
            self._start()
        self._stirred.set()
        threading.Thread(target=self._watch, name=f"{label}-watch", daemon=True).start()

    def submit(self, effect: ToTier) -> None:
        """Have it done, or refused; its end is posted."""
        kind = _kind(effect)
        lane, now = self._lanes[kind], self._clock()
        with self._lock:
            refused = self._shut or self._breakers[kind].refuses(now)
        if refused or self._slow(now) or not lane.put(effect):
            self._refuse(effect)
        self._stirred.set()

    # ------------------------------------------------------------ in a lane's thread

    def _work(self, effect: ToTier) -> None:
        breaker = self._breakers[_kind(effect)]
        with self._lock:
            number = breaker.enter(self._clock())
        if number is None:
            self._refuse(effect)
            return
        trouble: BaseException | None = None
        try:
            end = perform(effect, self._tier, self._arena, self._clock)
        except BaseException as error:  # noqa: BLE001 - anybody's code, and nobody above us
            trouble, end = error, fall_out(effect)
        with self._lock:
            turned = breaker.leave(number, trouble is None, self._clock())
            if trouble is not None:
                self._errors += 1
                self._trouble = _words(trouble)
        if trouble is not None:
            self._log_once(trouble)
        if turned:
            self._turned.set()
        self._stirred.set()
        self._post(end)

    def _refuse(self, effect: ToTier) -> None:
        with self._lock:
            self._refused += 1
        self._stirred.set()
        self._post(fall_out(effect))

    def _log_once(self, error: BaseException) -> None:
        """A tier's bug, once of each kind. ``TierDown`` is none: the watch tells of it."""
        with self._lock:
            new = type(error) not in self._seen
            self._seen.add(type(error))
        if new and not isinstance(error, TierDown):
            where = shown("".join(traceback.format_exception(error)).rstrip())
            _log.error("tier %s: it raised what no tier may\n%s", self._name, where)

    def _register(self, register: Callable[[Buffer], object]) -> None:
        """Tell the tier of the arena before it is asked for anything; meanwhile lanes only fill."""
        try:
            register(self._arena)
        except BaseException as error:  # noqa: BLE001 - as above; it can serve without
            _log.warning("tier %s: it cannot use the arena directly: %s", self._name, _words(error))
        self._registering_since = None
        self._stirred.set()  # it may have been reported as slow
        self._start()

    def _start(self) -> None:
        """Before anything is asked: starting a thread waits for it, and the loop must not."""
        for lane in self._lanes.values():
            lane.start()

    # ------------------------------------------------------------ the watch

    def _watch(self) -> None:
        while not self._shut:
            self._stirred.wait()
            self._stirred.clear()
            changed = self._look()
            self._turned.wait(_REPORT_S)
            if self._turned.is_set() or changed or self._busy:
                self._turned.clear()
                self._stirred.set()

    def _look(self) -> bool:
        """Act on what is slow, and tell what has changed; whether anything had."""
        slow = self._slow(self._clock())
        if slow:
            for lane in self._lanes.values():
                for effect in lane.drain():
                    self._refuse(effect)
        with self._lock:
            down = [kind for kind, breaker in self._breakers.items() if not breaker.closed]
            trouble = self._trouble if down else ""
            if slow:
                trouble = f"a call has been running for more than {self._slow_s:g} s"
            fields = {
                "name": self._name,
                "up": not trouble,
                "trouble": trouble,
                "errors": self._errors,
                "refused": self._refused,
                "queued": sum(lane.queued for lane in self._lanes.values()),
            }
        if self._up != fields["up"]:
            self._up = not self._up
            if self._up:
                _log.warning("tier %s is back", self._name)
            else:
                _log.warning("tier %s is down: %s", self._name, trouble)
        fields = {**self._report(), **fields}
        if fields == self._told or self._shut:
            return False
        self._told = fields
        self._post(TierReport(self._number, fields))
        return True

    def _report(self) -> dict[str, Any]:
        """What the tier tells of itself, as far as it can go into a status."""
        report = getattr(self._tier, "report", None)
        if report is None:
            return {}
        try:
            return {
                name: value
                for name, value in report().items()
                if _is_line(name) and (_is_line(value) or _is_number(value))
            }
        except BaseException as error:  # noqa: BLE001 - as above
            self._log_once(error)
            return {}

    def _slow(self, now: float) -> bool:
        """Whether a call takes too long to be well. A clear says nothing: it takes as long as there
        are records, of which a bucket may have millions, and the tier serves meanwhile."""
        running = [one for lane in self._lanes.values() for one in lane.running]
        begun = [since for since, effect in running if not isinstance(effect, TierClear)]
        if (registering := self._registering_since) is not None:
            begun.append(registering)
        return any(now - since > self._slow_s for since in begun)

    @property
    def _busy(self) -> bool:
        lanes = self._lanes.values()
        return self._registering_since is not None or any(lane.running for lane in lanes)

    # ------------------------------------------------------------ the end

    def close(self, timeout_s: float) -> bool:
        """Refuse what is queued and all that comes, wait for what runs, and close the tier.

        False: it did not make it in time; its threads still run, and the tier may hold threads of
        its own that Python would wait for.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._shut = True
        for lane in self._lanes.values():
            for effect in lane.drain():
                self._refuse(effect)
            lane.stop()
        self._stirred.set()
        self._turned.set()
        while self._busy:
            if time.monotonic() > deadline:
                _log.warning("tier %s: a call is still running; it is left behind", self._name)
                return False
            time.sleep(_POLL_S)
        closer = threading.Thread(target=self._close_tier, daemon=True)
        closer.start()
        closer.join(max(0.0, deadline - time.monotonic()))
        return not closer.is_alive()

    def _close_tier(self) -> None:
        try:
            self._tier.close()
        except BaseException as error:  # noqa: BLE001 - as above
            _log.warning("tier %s: it did not close: %s", self._name, _words(error))


def _kind(effect: ToTier) -> str:
    if isinstance(effect, TierProbe):
        return ASK
    if isinstance(effect, TierEpoch):
        return NOTE
    return LOAD if isinstance(effect, TierLoad) else STORE


def _words(error: BaseException) -> str:
    """One line of what an error says, that any encoding can take."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - anybody's exception, too
        text = ""
    line = shown(" ".join(text.split())) or type(error).__name__
    return line.encode("ascii", "replace").decode()[:_WORDS]


def _is_line(value: object) -> bool:
    """Whether it is a text that a status can say, however strange the tier."""
    return type(value) is str and len(value) <= _WORDS and value.isprintable()


def _is_number(value: object) -> bool:
    """As ``_is_line``, of numbers."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) is bool or (type(value) is float and math.isfinite(value))
