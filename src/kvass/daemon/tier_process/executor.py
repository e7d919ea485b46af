"""The thread pools that carry out the core's effects on a tier, in the tier's own process.

Law of this file: ``submit`` never blocks, and never raises because of the tier. Each effect gets
exactly one event as its result. While a tier is down, its effects fail at once: its records are
misses.

There are four kinds of work, each with its own queue and thread pool, so that no probe waits behind
bulk loads, and no load behind stores. ``TierEpoch`` effects have one thread: an epoch is stored as
a note of the tier, and no other thread may write that note between the read and the write. Each
kind also has its own ``Health``, so that a disk that has become read-only still serves loads;
``TierEpoch`` shares that of probes.

A fifth kind of work proves the store, if the tier is a ``ProvingTier``: at the start, every
``CHECK_S`` seconds, and before a kind of work that failed is tried again. While that fails, no
other call begins. If nobody tries again, a check does: it succeeds for stores only if it has
written.

An exception of the tier is a failure of that kind of work, except an ``ItemRefused`` of a request
that stands alone, a clear or an epoch: then the tier is up, and this effect alone has failed. While
a ``bounded`` call runs for too long, no further call begins: queued and new effects fail.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import msgspec

from kvass.core.effects import Emptied, FromTier, TierEpoch, TierReport, ToTier
from kvass.core.tiers.epochs import LOOK_AGAIN_S
from kvass.daemon.tier_process.health import Health, HealthState
from kvass.daemon.tier_process.operations import StoreCheck, how, perform
from kvass.daemon.tier_process.reports import LINE_CHARS, reportable
from kvass.errors import ItemRefused, TierDown
from kvass.processes import lower_priority
from kvass.tiers.base import Buffer, ProvingTier, Tier
from kvass.tiers.url import error_text, redacted

FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 30.0
CHECK_S: Final = 5.0
"""Seconds between two checks of a store. A check is one small read: on S3 a cent in a day and a
half."""
_REGISTRATION: Final = 0
"""Key in ``_running`` of the call of ``register_memory``; other keys are ids of threads."""
_log = logging.getLogger("kvass.tiers")

Post = Callable[[FromTier | TierReport], None]


class _Work:
    """One kind of work: its queue and its threads. ``nice``: the threads of bulk work have a lower
    priority than those that answer engines, and than engines."""

    def __init__(self, name: str, threads: int, nice: int, health: Health) -> None:
        self.health = health
        self.queue: deque[ToTier | StoreCheck] = deque()
        self.pool = ThreadPoolExecutor(threads, f"kvass-{name}", lower_priority, (nice,))


class Executor:
    """Carries out ``ToTier`` effects on one tier. It calls ``post`` with the results, from any
    thread.

    ``number`` is the number of the tier in the core. ``name`` is used in log lines. ``arena`` is
    the whole arena. A call that runs for longer than ``slow_s`` seconds is overdue. The tier's
    report is checked for changes every ``report_s`` seconds.
    """

    def __init__(
        self,
        number: int,
        tier: Tier,
        name: str,
        arena: Buffer,
        post: Post,
        *,
        slow_s: float = 10.0,
        report_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._number, self._tier, self._name = number, tier, name
        self._arena, self._post, self._clock = arena, post, clock
        self._slow_s, self._report_s = slow_s, report_s
        proving, probing, loading, storing = (
            Health(FIRST_PAUSE_S, _LONGEST_PAUSE_S) for _ in range(4)
        )
        self._works = {
            "check": _Work("check", 1, 0, proving),
            "probe": _Work("probe", 2, 0, probing),
            "epoch": _Work("epoch", 1, 0, probing),
            "load": _Work("load", 4, 5, loading),
            "store": _Work("store", 2, 10, storing),
        }
        self._lock = threading.Lock()
        """Guards the fields below and all queues. It is never held during a call of the tier."""
        self._running: dict[int, float] = {}
        """Thread -> the time at which its call of the tier began, if it is ``bounded``."""
        self._errors = self._refused = 0
        self._trouble = ""
        self._unnoted: dict[bytes, tuple[float, str]] = {}
        """Namespace -> when its epoch could not be read or noted, although the tier is up, and
        why."""
        self._logged: set[type[BaseException]] = set()
        self._closed = False
        self._proves = isinstance(tier, ProvingTier)
        self._check_at = clock() + CHECK_S
        self._reported: dict[str, Any] = {"up": True}
        self._changed = threading.Event()
        """Set when the tier goes down or comes back, so that this is reported at once."""
        self._registered = threading.Event()
        """Set when ``register_memory`` has ended. Until then all effects wait in the queues."""
        register = getattr(tier, "register_memory", None)
        if register is None:
            self._registered.set()
        else:
            self._running[_REGISTRATION] = clock()
            self._works["epoch"].pool.submit(self._register, register)
        threading.Thread(target=self._watch, name="kvass-watch", daemon=True).start()

    def submit(self, effect: ToTier | StoreCheck) -> None:
        """Queue ``effect``, or refuse it if the tier is down. The result is passed to ``post``."""
        work = self._works[how(effect).work]
        with self._lock:
            accepted = self._serves(work, self._clock()) and not self._closed
            if accepted:
                work.queue.append(effect)
                work.pool.submit(self._do_next, work)
        if not accepted:
            self._refuse(effect)

    def check(self, whole: bool = True) -> bool:
        """Have the tier prove its store, if it can. Returns whether it can."""
        with self._lock:
            now = self._clock()
            self._check_at = now + CHECK_S
            proving = self._works["check"].health
            alone = self._left_alone(now)
            whole = whole or proving.state is not HealthState.UP or bool(alone)
        if self._proves:
            self.submit(StoreCheck(whole, partial(self._proven, alone)))
        return self._proves

    def _left_alone(self, now: float) -> list[str]:
        """The kinds of work that failed and that nobody has tried again although they might have.
        The caller holds the lock."""
        healths = {name: work.health for name, work in self._works.items() if name != "check"}
        return [
            name
            for name, health in healths.items()
            if health.state is HealthState.DOWN and health.accepts(now - CHECK_S)
        ]

    def _proven(self, alone: list[str], written: bool) -> None:
        """A check has succeeded: it was a try of the kinds of work that nobody tries."""
        with self._lock:
            now = self._clock()
            for name in alone:
                health = self._works[name].health
                if health.state is not HealthState.DOWN:
                    continue  # somebody tries, or it shares its health
                if written or name != "store":
                    health.succeeded(now)
                else:
                    health.failed(now)
                self._changed.set()

    def _serves(self, work: _Work, now: float) -> bool:
        """Whether such a call of the tier may begin. The caller holds the lock."""
        proving = self._works["check"]
        proven = work is proving or proving.health.state is HealthState.UP
        return proven and work.health.accepts(now) and not self._has_overdue(now)

    # ------------------------------------------------------------ in a pool's thread

    def _do_next(self, work: _Work) -> None:
        thread = threading.get_ident()
        self._registered.wait()
        with self._lock:
            if not work.queue:  # the effect was refused meanwhile
                return
            effect, now = work.queue.popleft(), self._clock()
            begun = work.health.begin(now) if self._serves(work, now) else None
            unproven = self._proves and work.health.state is HealthState.RETRYING
            if begun is not None and how(effect).bounded:
                self._running[thread] = now
        if begun is None:
            self._refuse(effect)
            return
        error: BaseException | None = None
        end: FromTier | None = None
        try:
            if unproven and not isinstance(effect, StoreCheck):
                perform(StoreCheck(whole=True), self._tier, self._arena)
                unproven = False
            end = perform(effect, self._tier, self._arena)
        except BaseException as raised:  # noqa: BLE001 - a tier may raise anything; no caller above
            error = raised
            self._log_once(error)
        up = error is None or (how(effect).alone and isinstance(error, ItemRefused))
        with self._lock:
            self._running.pop(thread, None)
            if error is not None:
                self._errors += 1
                trouble = self._text_of(error)
                end = _failed(effect, trouble)
                self._trouble = self._trouble if up else trouble
            if isinstance(effect, TierEpoch):
                self._unnoted.pop(effect.namespace, None)
                if error is not None and up:
                    why = f"an epoch cannot be noted: {trouble}"
                    self._unnoted[effect.namespace] = self._clock(), why
            changed = work.health.end(begun, up, self._clock())
            proving = self._works["check"].health
            if not up and unproven and proving.state is HealthState.UP:
                proving.failed(self._clock())
            if changed:
                self._changed.set()
        if end is not None:
            self._post(end)

    def _text_of(self, error: BaseException) -> str:
        text = _one_line(error)
        for name in (self._name, self._name.partition(":")[2]):  # log lines begin with it
            text = text.removeprefix(f"{name}: ")
        return text

    def _register(self, register: Callable[[Buffer], object]) -> None:
        try:
            register(self._arena)
        except BaseException as error:  # noqa: BLE001 - as above; the tier works without it
            text = _one_line(error)
            _log.warning("tier %s: it cannot use the arena directly: %s", self._name, text)
        with self._lock:
            del self._running[_REGISTRATION]
        self._registered.set()

    def _refuse(self, *effects: ToTier | StoreCheck) -> None:
        ends = [end for effect in effects if (end := _failed(effect, self._trouble)) is not None]
        with self._lock:
            self._refused += len(ends)
        for end in ends:
            self._post(end)

    def _log_once(self, error: BaseException) -> None:
        """Log an exception that a tier may not raise, once per type. ``TierDown`` is not logged
        here; ``_report`` logs that the tier is down."""
        with self._lock:
            new = type(error) not in self._logged
            self._logged.add(type(error))
        if new and not isinstance(error, TierDown):
            where = redacted("".join(traceback.format_exception(error)).rstrip())
            _log.error("tier %s: it raised what no tier may\n%s", self._name, where)

    # ------------------------------------------------------------ what is overdue, and reports

    def _has_overdue(self, now: float) -> bool:
        """Whether a call runs for too long. The caller holds the lock."""
        return any(now - since > self._slow_s for since in self._running.values())

    def _watch(self) -> None:
        while not self._closed:
            with self._lock:
                now = self._clock()
                overdue = self._has_overdue(now)
                check_due = self._check_due(now)
            if overdue:
                self._refuse_queued()
            if check_due:
                self.check(whole=False)
            self._report(overdue)
            self._changed.wait(self._report_s)
            self._changed.clear()

    def _check_due(self, now: float) -> bool:
        """Whether it is time for a check of the store. The caller holds the lock."""
        work = self._works["check"]
        due = work.health.state is not HealthState.UP or now >= self._check_at
        return self._proves and due and not work.queue  # a slow store gets no more than it answers

    def _report(self, overdue: bool) -> None:
        """Log that the tier went down or is back. Post the tier's report if it has changed."""
        fields = self._report_of_tier()
        with self._lock:
            healthy = all(work.health.state is HealthState.UP for work in self._works.values())
            up = healthy and not overdue
            gone = (
                self._clock() - 2 * LOOK_AGAIN_S
            )  # the core asks no more for a namespace that left
            self._unnoted = {ns: one for ns, one in self._unnoted.items() if one[0] > gone}
            _, unnoted = next(iter(self._unnoted.values()), (gone, ""))
            trouble = unnoted if up else self._trouble
            if overdue:
                trouble = f"a call has been running for more than {self._slow_s:g} s"
            fields |= {
                "name": self._name,
                "up": up,
                "trouble": trouble[:LINE_CHARS],
                "errors": self._errors,
                "refused": self._refused,
                "queued": sum(len(work.queue) for work in self._works.values()),
            }
        if up and not self._reported["up"]:
            _log.warning("tier %s is back", self._name)
        elif self._reported["up"] and not up:
            _log.warning("tier %s is down: %s", self._name, fields["trouble"])
        if fields != self._reported and not self._closed:
            self._reported = fields
            self._post(TierReport(self._number, fields))

    def _report_of_tier(self) -> dict[str, Any]:
        """Return the fields of the tier's own report that can be part of ``kvass status``."""
        try:
            return reportable(self._tier.report() if hasattr(self._tier, "report") else {})
        except BaseException as error:  # noqa: BLE001 - as above
            self._log_once(error)
            return {}

    # ------------------------------------------------------------ the end

    def _refuse_queued(self) -> None:
        with self._lock:
            queued = [effect for work in self._works.values() for effect in work.queue]
            for work in self._works.values():
                work.queue.clear()
        self._refuse(*queued)

    def close(self, timeout_s: float) -> bool:
        """Refuse queued and new effects, wait for running calls, and close the tier.

        Returns False if that took longer than ``timeout_s``. The caller must then leave with
        ``os._exit``, because on a normal exit Python waits for running threads.
        """
        with self._lock:
            self._closed = True
        self._changed.set()
        self._refuse_queued()
        closer = threading.Thread(target=self._close_tier, daemon=True)
        closer.start()
        closer.join(timeout_s)
        if closer.is_alive():
            _log.warning("tier %s: a call is still running; it is left behind", self._name)
        return not closer.is_alive()

    def _close_tier(self) -> None:
        for work in self._works.values():
            work.pool.shutdown()
        try:
            self._tier.close()
        except BaseException as error:  # noqa: BLE001 - as above
            _log.warning("tier %s: it did not close: %s", self._name, _one_line(error))


def _failed(effect: ToTier | StoreCheck, why: str) -> FromTier | None:
    end = effect.failed()
    return msgspec.structs.replace(end, why=why) if isinstance(end, Emptied) else end


def _one_line(error: BaseException) -> str:
    """Return the text of an error as one ASCII line of at most ``LINE_CHARS``."""
    line = " ".join(redacted(error_text(error)).split()) or type(error).__name__
    return line.encode("ascii", "replace").decode()[:LINE_CHARS]
