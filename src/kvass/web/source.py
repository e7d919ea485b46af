"""The daemon's status, cached for a second, and its history: samples and events.

Law of this file: memory is bounded. The history has at most ``SAMPLES`` samples of at most
``COLUMNS`` numbers, and at most ``EVENTS`` events of one line.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from kvass.client.client import Client
from kvass.client.health import notes, troubles
from kvass.errors import Incompatible, KvassError
from kvass.web.containers import container_of
from kvass.web.events import changes
from kvass.web.metrics import model_labels, tenant_label, tier_labels

FRESH_S: Final = 1.0
"""Seconds for which a status is cached."""
ANSWER_S: Final = 2.0
"""Seconds after which a daemon that does not answer is down."""
SAMPLE_S: Final = 10.0
SAMPLES: Final = 1440  # four hours
COLUMNS: Final = 192
EVENTS: Final = 200
FOR_ROOM: Final = ("capacity", "handed_over", "orphaned")
"""The reasons of evictions that make room for other rows."""
_EVENT_CHARS: Final = 200
_log = logging.getLogger("kvass.web")


def figures(fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The names and numbers of a sample: gauges, and counters since the daemon started.

    ``asked/MODEL`` are tokens looked up, ``hit/TIER/MODEL`` those that hit, ``missed/REASON/MODEL``
    those that missed. ``saved/MODEL`` are seconds of prefill. ``in/TIER``, ``out/TIER`` and
    ``evicted`` are bytes. ``tenant-asked/TENANT`` and so on are the same by tenant. A name may come
    several times; its numbers are then added. What a counter of a reason or a tenant has not
    counted yet is left out, and so is what is not known yet.
    """
    yield "l1_used_bytes", fields["l1_used_bytes"]
    yield "leases", fields["leases"]
    counters = fields["counters"]
    yield "lookups", counters["lookups"]
    yield "evicted", sum(counters[f"bytes_evicted_{why}"] for why in FOR_ROOM)
    yield "in/l1", counters["l1_in_bytes"]
    yield "out/l1", counters["l1_lent_bytes"]
    tiers = tier_labels([tier["tier"] for tier in fields["tiers"]])
    for name, tier in zip(tiers, fields["tiers"], strict=True):
        yield f"in/{name}", tier["stored_bytes"]
        yield f"out/{name}", tier["loaded_bytes"]
    namespaces = [*fields["forgotten"], *fields["namespaces"]]
    for model, ns in zip(model_labels(namespaces), namespaces, strict=True):
        yield f"asked/{model}", ns["lookup_tokens"]
        yield f"hit/l1/{model}", ns["hit_tokens"] - sum(ns["hit_tokens_tiers"])
        for name, tokens in zip(tiers, ns["hit_tokens_tiers"], strict=True):
            yield f"hit/{name}/{model}", tokens
        if ns["saved_prefill_s"] is not None:
            yield f"saved/{model}", ns["saved_prefill_s"]
    for model, ns in zip(model_labels(namespaces), namespaces, strict=True):
        yield from _missed("missed", model, ns)
    for tenant in fields["tenants"]:
        if tenant["lookup_tokens"]:
            name = tenant_label(tenant)
            yield f"tenant-asked/{name}", tenant["lookup_tokens"]
            yield f"tenant-hit/all/{name}", tenant["hit_tokens"]
            yield from _missed("tenant-missed", name, tenant)


def _missed(kind: str, whose: str, fields: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for why, tokens in fields.get("miss_tokens", {}).items():
        if tokens:
            yield f"{kind}/{why}/{whose}", tokens


class Source:
    """The status and the history of the daemon at ``socket``. Thread-safe.

    ``daemon_uid``: the daemon's user, if it was named (docs/operating.md).
    """

    def __init__(self, socket: str, daemon_uid: int | None = None) -> None:
        self.new_client = partial(Client, socket, daemon_uid=daemon_uid)
        """Makes a client for one long request, because a client waits for one answer at a time."""
        self.client = self.new_client()
        self._lock = threading.Lock()
        self._logged: set[type[Exception]] = set()
        """The kinds of errors of samples that were logged."""
        self._fields: dict[str, Any] | None = None
        self._trouble = "not asked yet"
        self._asked_s = -FRESH_S
        self._columns: list[str] = []
        """The names of a sample's numbers, in the order in which they first appeared."""
        self._samples: deque[tuple[float, array[float]]] = deque(maxlen=SAMPLES)
        self._events: deque[tuple[float, str]] = deque(maxlen=EVENTS)

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """The status, with its ``troubles``, its ``notes`` and each engine's ``container``, and an
        empty text; or ``None`` and why it is missing."""
        with self._lock:
            if time.monotonic() - self._asked_s >= FRESH_S:
                before = self._fields
                try:
                    self._fields, self._trouble = self._newest(), ""
                    self._fields["notes"] = notes(self._fields)
                    self._fields["troubles"] = troubles(self._fields)
                    for engine in self._fields["engines"]:
                        engine["container"] = container_of(next(iter(engine["pids"]), 0))
                except KvassError as error:
                    self._fields, self._trouble = None, str(error)
                self._asked_s = time.monotonic()
                now = round(time.time(), 1)
                for line in changes(before, self._fields):
                    self._events.append((now, line[:_EVENT_CHARS]))
            return self._fields, self._trouble

    def _newest(self) -> dict[str, Any]:
        fields = self.client.status(ANSWER_S)
        if "histograms" not in fields:
            version = fields.get("version")
            raise Incompatible(f"the daemon is older than this ({version}): restart it")
        return fields

    def sample(self) -> None:
        """Add a sample to the history. None is added while the daemon is down."""
        fields, _ = self.status()
        if fields is None:
            return
        sums: dict[str, float] = {}
        for name, number in figures(fields):
            sums[name] = sums.get(name, 0) + number
        with self._lock:
            new = [name for name in sums if name not in self._columns]
            self._columns += new[: COLUMNS - len(self._columns)]
            numbers = array("d", (sums.get(name, 0) for name in self._columns))
            self._samples.append((round(time.time(), 1), numbers))

    def sample_for_ever(self) -> None:
        """Add a sample every ``SAMPLE_S``. Runs in a thread of its own."""
        while True:
            try:
                self.sample()
            except (LookupError, TypeError, ValueError) as error:  # a status of another version
                if type(error) not in self._logged:
                    self._logged.add(type(error))
                    _log.exception("a sample failed; more %ss are not logged", type(error).__name__)
            time.sleep(SAMPLE_S)

    def history(self, since: float = 0.0) -> dict[str, Any]:
        """The history as JSON-able values.

        ``columns`` are the names of the numbers. ``samples`` are those after the time ``since``,
        oldest first, each as its time and its numbers. Older samples may have fewer numbers.
        Counters begin again at 0 when the daemon restarts. ``events`` are the last ones, each as
        its time and its line.
        """
        with self._lock:
            samples = [[when, *numbers] for when, numbers in self._samples if when > since]
            events = list(self._events)
        return {"columns": self._columns, "samples": samples, "events": events}
