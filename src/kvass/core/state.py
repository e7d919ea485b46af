"""The state of the core, in one place. The files in ``handlers`` and ``tiers`` change it."""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from kvass.core.clients.connection_limits import ConnectionLimits
from kvass.core.clients.layouts import Layouts
from kvass.core.clients.lookup_log import LookupLog
from kvass.core.clients.registry import ClientConnection, Instance, Refusal
from kvass.core.clients.session_prompts import SessionPrompts
from kvass.core.clients.shadow_figures import ShadowFigures
from kvass.core.effects import Effect, Send
from kvass.core.histogram import Histogram
from kvass.core.matching import keeping
from kvass.core.matching.keeping import Found
from kvass.core.matching.prefix import Hit
from kvass.core.metrics import COUNTERS, HISTOGRAMS
from kvass.core.pending.follow_ups import FollowUps
from kvass.core.pending.promotion import Promotions
from kvass.core.pending.settlement import Settlement
from kvass.core.pending.tier_operations import Clearing
from kvass.core.pending.tier_state import FlushMode, Tiers
from kvass.core.rows.followers import Followers
from kvass.core.rows.namespaces import Namespaces
from kvass.core.rows.row_allocator import RowAllocator
from kvass.core.rows.row_classes import Namespace, RowClasses
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.session_end import SessionEnd
from kvass.core.rows.tables import CoreTables
from kvass.core.saved.index_file import SavedIndex
from kvass.messages import FromClient, FromDaemon, Matched, RequestContext
from kvass.types import Limits, Quota, Timing

NOBODY: Final = -1
"""In place of a connection: the core itself asked, and gets no answer."""
_REFUSALS: Final = 8
"""The most entries of ``State.refusals``."""
SHORT_PAUSE_S: Final = 60.0
"""Without a tier, rows of a session that comes back within this are retained until then. To keep
those of longer pauses would take the room from sessions that are sooner back."""
SLACK: Final = 1.5
"""How many times as long as it said a session may take, and find its rows retained."""


class CoreConfig(msgspec.Struct, frozen=True):
    """The configuration of a core. ``extent_bytes`` None: min(64 MiB, arena / 64)."""

    boot: bytes
    arena_bytes: int
    extent_bytes: int | None = None
    timing: Timing = Timing()
    limits: Limits = Limits()
    version: str = ""
    pid: int = 0
    """The daemon's process id, for display."""
    lasting: bool = False
    """Whether the arena outlives the daemon."""
    host: str = ""
    """The name of the daemon's machine, for display."""
    started_s: float = 0.0
    """When the daemon started, by the clock of ``step``."""
    seed: bytes = b""
    """The secret from which the indexes hash keys. No client learns it, unlike ``boot``."""
    tiers: tuple[str, ...] = ()
    """The names of the tiers at the start, in the order in which lookups ask them."""
    flush: FlushMode = "write_through"
    keep_loaded: bool = True
    """Whether promoted rows stay in L1 after their last unpin."""
    keep_share: float = 0.25
    """The part of a tenant's share of L1 that its retained rows may take."""
    skip_slow_loads: bool = True
    """Whether a promotion is skipped if computing the tokens is faster."""
    quotas: tuple[Quota, ...] = ()
    slice_slots: int = 2048
    """How many slots of cleared rows one step gives back: 2 ms of work."""
    slice_ends: int = 32
    """The most leases, reservations, lookups and connections that one step ends or continues, and
    the most row classes that it clears: 5 ms of work."""


class State:
    def __init__(self, config: CoreConfig, index: SavedIndex | None = None) -> None:
        self.config = config
        self.index = index
        """What outlives the daemon; ``None``: nothing does."""
        self.lost_workers: set[int] = set()
        """Lost connections that ``index`` still has, because their devices may write."""
        self.unseen: tuple[int, ...] = ()
        """The former workers whose end nobody can see."""
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        extent = config.extent_bytes or min(64 << 20, max(1, config.arena_bytes // 64))
        tables = CoreTables(config.arena_bytes, index)
        ages = self.histograms["age_at_eviction_seconds"]
        follow = self.followers = _followers(config, tables, self.counters, ages)
        self.classes = RowClasses(
            tables, extent, config.seed, follow.policy, follow.saving, follow.listeners
        )
        self.rows = RowStates(self.classes)
        self.allocator = RowAllocator(self.rows, tables, config.slice_slots)
        self.tenants = tables.tenants
        for quota in config.quotas:
            self.tenants.set(quota)
        self.follow_ups = FollowUps()
        self.settlement = Settlement(
            self.rows, config.timing, self.counters, self.follow_ups, config.slice_ends
        )
        self.leases, self.reservations = self.settlement.leases, self.settlement.reservations
        self.connections: dict[int, ClientConnection] = {}
        self.connection_limits = ConnectionLimits(
            config.limits, config.timing.hello_s, config.slice_ends
        )
        self.instances: dict[str, Instance] = {}
        self.namespaces = Namespaces(config.limits.namespaces)
        self.shadow_gone: dict[str, ShadowFigures] = {}
        """By engine, the last reports of engines in shadow mode that are gone."""
        self.refusals: dict[str, Refusal] = {}
        """The last refused engines, by name, until they register."""
        self.messages: Counter[type[FromClient]] = Counter()
        """The number of received messages by kind, including refused ones."""
        self.log = LookupLog()
        self.sessions = SessionPrompts()
        self.layouts = Layouts()
        self.clears: list[Clearing] = []
        """The clears that have something in L1 left to clear; the oldest is first."""
        self.endings: list[SessionEnd] = []
        """The ends of clients' sessions that are not done; the oldest is first."""
        self.populated_bytes = 0
        self.now = float("-inf")
        self.out: list[Effect] = []
        """The effects of the step in progress."""
        self.tiers = Tiers(config.tiers, config.boot)
        self.promotions = Promotions()
        self.turn = 0
        """The next kind of work of which a tick does a slice (``machine._WORK``)."""
        self.stopping = False

    @property
    def leaving(self) -> bool:
        """Whether the next daemon gets the memory. Nothing is granted then, so what is being
        written is soon either complete or given up. Lookups are answered until the end."""
        return self.stopping and self.config.lasting

    @property
    def fetch_due(self) -> bool:
        """Whether it is time to fetch what a session will ask for."""
        return (due := self.sessions.next_due) is not None and due <= self.now

    @property
    def unreclaimed(self) -> bool:
        """Whether ``reclaim``, or ``warm`` of the classes, has work left."""
        return bool(self.allocator.unfinished or self.followers.segments.cleared)

    def reclaim(self) -> None:
        """Give back a part of what cleared rows had: room of L1, and memory."""
        self.allocator.reclaim()
        self.followers.segments.reclaim()

    def send(self, connection: int, message: FromDaemon, with_arena: bool = False) -> None:
        """Add an effect that sends a message, unless it is for ``NOBODY``."""
        if connection != NOBODY:
            self.out.append(Send(connection, message, with_arena))

    def matched(
        self,
        instance: str,
        request: str,
        first: int,
        hit: Hit,
        readers: set[int],
        spare: int,
        again: bool = False,
    ) -> Matched:
        """The answer to a lookup. It pins the rows of ``hit`` under a lease for ``readers``, and
        counts them.

        A hit that has only the ``first`` chunks, which the engine has itself, is a miss without a
        lease. ``again``: the chunks of the hit were counted before.
        """
        if hit.chunks == first and not hit.blocks:
            return Matched(boot=self.config.boot, first=first, chunks=first)
        lease = self.settlement.begin_lease(instance, request, hit.parts, readers)
        self.counters["hit_chunks"] += 0 if again else hit.chunks - first
        self.counters["hit_blocks"] += hit.blocks
        return Matched(
            boot=self.config.boot,
            lease=lease.id,
            first=first,
            chunks=hit.chunks,
            given_s=self.now,
            deadline_s=lease.deadline,
            slots=tuple([self.rows.slots(part.rows) for part in hit.parts]),
            spare=spare,
            blocks=hit.blocks,
        )

    def keep(self, ns: Namespace, found: list[Found], context: RequestContext) -> int:
        """Retain rows of a prompt, if its request asks for that. Returns how many chunks are
        retained. ``found``: as of ``matching.keeping``."""
        seconds = context.keep_s
        if not seconds and not self.tiers.used and context.then_s <= SHORT_PAUSE_S:
            seconds = SLACK * context.then_s
        if not seconds:
            return 0
        payer = self.tenants.payer(context.tenant)
        kept, clipped = keeping.keep(self.rows, self.followers.kept, ns, found, seconds, payer)
        self.counters["not_kept_chunks"] += clipped
        return kept

    def refused(self, instance: str, text: str) -> None:
        """Record that an engine was refused when it registered."""
        self.refusals.pop(instance, None)
        self.refusals[instance] = Refusal(self.now, text)
        if len(self.refusals) > _REFUSALS:
            del self.refusals[next(iter(self.refusals))]

    @property
    def loading_bytes(self) -> int:
        """The bytes of all LOADING rows (law 12)."""
        return sum(tier.speed.loading_bytes + tier.ahead_bytes for tier in self.tiers.all)

    @property
    def engine_cache_bytes(self) -> int:
        """The size of the engines' own KV caches together, as far as they told it."""
        return sum(instance.cache_bytes for instance in self.instances.values())

    @property
    def quota(self) -> int:
        """The most bytes that one instance may have reserved or quarantined (law 12)."""
        return int(self.config.arena_bytes * self.config.limits.instance_write_share)

    def namespace_of(self, instance: Instance) -> Namespace | None:
        """The instance's namespace; ``None`` while ranks are not registered."""
        return None if instance.namespace is None else self.namespaces[instance.namespace]


def _followers(
    config: CoreConfig, tables: CoreTables, counters: dict[str, int], ages: Histogram
) -> Followers:
    memory, share = config.limits.segment_index_bytes, config.keep_share
    return Followers(tables, counters, ages, config.seed, memory, share)
