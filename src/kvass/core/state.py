"""The nouns of the machine in one place: what ``machine``, ``flows``, ``checks``, ``report`` share.

Law of this file: fields, and questions about them; what changes them is elsewhere.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from kvass.core.custody import Custody
from kvass.core.effects import Effect, Send
from kvass.core.l1 import L1, Namespace
from kvass.core.places import Places
from kvass.core.registry import Instance, Session
from kvass.core.tiers import Flushes, FlushMode, Promotions, Tiers
from kvass.messages import FromClient, FromDaemon
from kvass.types import Limits, Timing


class CoreConfig(msgspec.Struct, frozen=True):
    """What a machine is born with. ``extent_bytes`` None: min(64 MiB, arena / 64)."""

    boot: bytes
    arena_bytes: int
    extent_bytes: int | None = None
    timing: Timing = Timing()
    limits: Limits = Limits()
    version: str = ""
    seed: bytes = b""
    """Secret: what spreads the index's keys. Told to nobody, unlike ``boot``."""
    tiers: tuple[str, ...] = ()
    """Names of the tiers, in the order in which they are asked."""
    flush: FlushMode = "write_through"
    retain_promoted: bool = True
    """Whether promoted rows stay in L1 when nobody reads them any more."""
    weigh_loads: bool = True
    """Whether what is cheaper to compute again is not promoted."""
    slice_slots: int = 2048
    """Slots of cleared rows that one step gives back: 2 ms of work."""
    slice_ends: int = 64
    """Leases, reservations, lookups and sessions that one step ends, or lets go on, of those whose
    turn has come together: 5 ms of work."""


class State:
    """Everything the daemon knows."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        extent = config.extent_bytes or min(64 << 20, max(1, config.arena_bytes // 64))
        self.l1 = L1(config.arena_bytes, extent, config.seed, slice_slots=config.slice_slots)
        self.custody = Custody(self.l1, config.timing, config.slice_ends)
        self.ledger = self.custody.ledger
        self.sessions: dict[int, Session] = {}
        self.places = Places(config.limits, config.timing.hello_s, config.slice_ends)
        self.instances: dict[str, Instance] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.by_digest: dict[bytes, int] = {}
        self.counters: Counter[str] = Counter()
        self.messages: Counter[type[FromClient]] = Counter()
        """What sessions have said, by kind, refused or not."""
        self.populated_bytes = 0
        self.now = float("-inf")
        self.out: list[Effect] = []
        """What the step in progress has the shell do."""
        self.tiers = Tiers(config.tiers, config.boot)
        self.promotions = Promotions()
        self.flushes = Flushes(len(config.tiers))
        self.stopping = False

    def send(self, session: int, message: FromDaemon) -> None:
        """Have ``message`` sent: an answer that comes later than its request's step."""
        self.out.append(Send(session, message))

    @property
    def loading_bytes(self) -> int:
        """Bytes of all LOADING rows (law 12)."""
        asked = sum(speed.loading_bytes for speed in self.tiers.speeds)
        return asked + sum(one.failed_bytes for one in self.promotions.waking)

    @property
    def quota(self) -> int:
        """Bytes one instance may have reserved or quarantined (law 12)."""
        return int(self.config.arena_bytes * self.config.limits.instance_write_share)

    def namespace_of(self, instance: Instance) -> Namespace | None:
        """The instance's namespace, while all its ranks are registered."""
        return None if instance.namespace is None else self.namespaces[instance.namespace]
