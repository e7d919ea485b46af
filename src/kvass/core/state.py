"""The state of the machine in one place; what changes it is in the other files."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvass.core.effects import Effect, Send
from kvass.core.metrics import COUNTERS
from kvass.core.prefix import Hit
from kvass.core.registry import ClientSession, Instance
from kvass.core.row_store import Namespace, RowStore
from kvass.core.session_limits import SessionLimits
from kvass.core.settlement import Settlement
from kvass.core.tier_state import FlushMode, Promotions, Tiers
from kvass.messages import FromClient, FromDaemon, Matched
from kvass.types import Limits, Timing


class CoreConfig(msgspec.Struct, frozen=True):
    """What a machine is born with. ``extent_bytes`` None: min(64 MiB, arena / 64)."""

    boot: bytes
    arena_bytes: int
    extent_bytes: int | None = None
    timing: Timing = Timing()
    limits: Limits = Limits()
    version: str = ""
    pid: int = 0
    """The daemon's, for people."""
    started_s: float = 0.0
    """When it started, by the clock of its steps."""
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
    slice_ends: int = 32
    """Leases, reservations, lookups and sessions that one step ends, or lets go on, of those whose
    turn has come together: 5 ms of work."""


class State:
    """Everything the daemon knows."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.counters = dict.fromkeys(COUNTERS, 0)
        extent = config.extent_bytes or min(64 << 20, max(1, config.arena_bytes // 64))
        self.store = RowStore(
            config.arena_bytes, extent, self.counters, config.seed, slice_slots=config.slice_slots
        )
        self.settlement = Settlement(self.store, config.timing, self.counters, config.slice_ends)
        self.leases, self.reservations = self.settlement.leases, self.settlement.reservations
        self.sessions: dict[int, ClientSession] = {}
        self.session_limits = SessionLimits(config.limits, config.timing.hello_s, config.slice_ends)
        self.instances: dict[str, Instance] = {}
        self.namespaces: dict[int, Namespace] = {}
        self.by_digest: dict[bytes, int] = {}
        self.messages: Counter[type[FromClient]] = Counter()
        """Messages that were received, by kind, refused ones included."""
        self.populated_bytes = 0
        self.now = float("-inf")
        self.out: list[Effect] = []
        """What the step in progress has the daemon do."""
        self.tiers = Tiers(len(config.tiers), config.boot)
        self.promotions = Promotions()
        self.stopping = False

    def send(self, session: int, message: FromDaemon, with_arena: bool = False) -> None:
        self.out.append(Send(session, message, with_arena))

    def matched(
        self,
        instance: str,
        ns: Namespace,
        request: str,
        first: int,
        hit: Hit,
        readers: set[int],
        spare: int,
        again: bool = False,
    ) -> Matched:
        """The answer to a lookup: ``hit`` is lent to ``readers``. If it has but the ``first``
        chunks, it is a miss. ``again``: the hit's chunks are counted already."""
        if hit.chunks == first and not hit.blocks:
            return Matched(boot=self.config.boot, first=first, chunks=first)
        lease = self.settlement.lend(instance, request, hit.parts, readers)
        chunks = 0 if again else hit.chunks - first
        self.counters["hit_chunks"] += chunks
        self.counters["hit_blocks"] += hit.blocks
        ns.traffic.give(self.now, chunks * ns.chunk_tokens + ns.block_tokens(hit.blocks))
        return Matched(
            boot=self.config.boot,
            lease=lease.id,
            first=first,
            chunks=hit.chunks,
            given_s=self.now,
            deadline_s=lease.deadline,
            slots=tuple([self.store.slots(part.rows) for part in hit.parts]),
            spare=spare,
            blocks=hit.blocks,
        )

    @property
    def loading_bytes(self) -> int:
        """Bytes of all LOADING rows (law 12)."""
        return sum(tier.speed.loading_bytes for tier in self.tiers.all)

    @property
    def quota(self) -> int:
        """Bytes one instance may have reserved or quarantined (law 12)."""
        return int(self.config.arena_bytes * self.config.limits.instance_write_share)

    def namespace_of(self, instance: Instance) -> Namespace | None:
        """The instance's namespace, while all its ranks are registered."""
        return None if instance.namespace is None else self.namespaces[instance.namespace]
