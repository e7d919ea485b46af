"""The settings of an engine that both halves of a connector need. Each process reads them once, at
its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvass.client.parallel import ParallelStrategy
from kvass.engine.boundary import log, log_off
from kvass.errors import ConfigError
from kvass.layout.spans import Spans
from kvass.messages import Register
from kvass.types import GroupLayout, RankLayout

MIN_CHUNK_TOKENS: Final = 256
"""The smallest default size of a chunk."""


@dataclass(frozen=True)
class Inert:
    """The reason why this engine must run uncached."""

    reason: str


@dataclass(frozen=True)
class Verification:
    """How often copies are verified after the first ones (``verifier.py``): one in ``every`` jobs,
    0: none, None: the default for the device. Until ``trial_loads`` loads were verified and equal,
    it is at least one in ``trial_every``; 0: no trial."""

    every: int | None = None
    trial_every: int = 0
    trial_loads: int = 0


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What ``load_admission.py`` must know of an engine. ``step_tokens``: the most tokens that it
    computes before it frees blocks that are no longer in a window. ``draft_tokens``: how many
    tokens, drafts among them, a request needs room for when it begins to decode; 0 if it has no
    drafts. ``rings``: the groups of which each request has one block from its beginning on."""

    step_tokens: int
    draft_tokens: int
    rings: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The settings of one engine. Sizes are in tokens; sequences are indexed by group id.
    ``groups`` names the layers of one rank; only a worker knows its own layers. ``strategy`` is
    that of the scheduler; a worker uses ``strategy.at(rank)``."""

    socket: str
    instance: str
    identity: Mapping[str, str]
    strategy: ParallelStrategy
    chunk_tokens: int
    groups: tuple[GroupLayout, ...]
    loads: bool
    stores: bool
    daemon_uid: int | None = None
    """The user id of the daemon, where the socket's files do not show it (``wire.trust``)."""
    chunk_blocks: int = 0
    """How many blocks a chunk has, if hits may end at each block. Then all groups are ``full`` with
    one block size, and each block has a hash. 0: hits end at chunk boundaries only."""
    hash_tokens: int = 0
    """The tokens of one block hash (``Request.block_hashes``); 0: there are none, so that it is not
    learned whether answers are repeated."""
    answers: bool | None = None
    """Whether KV of generated tokens is stored; None: that is learned (``answers.py``)."""
    thinks: bool = False
    """Answers may begin with thinking. Chat templates often leave it out of later prompts."""
    spare: int = 0
    """How many chunks after a hit must be cached, too (``messages.Lookup``)."""
    skip_slow_loads: bool = True
    """A hit is computed if that is faster than its load (``worth.py``)."""
    window_interval: int = 0
    """Windows are stored at every so many tokens, and where hits are likely to end; 0: at each
    chunk (``layout/windows.py``)."""
    fixed_weights: bool = False
    """A reset of the engine's cache never means that its weights were replaced."""
    one_queue: bool = False
    """The engine stops at the first waiting request for which it has no free blocks. Requests that
    hold blocks, because their load has ended, may wait behind it (``head_of_line.py``)."""
    admission: Admission | None = None
    """Set if the engine counts too few blocks when it admits a load."""
    early_lookups: int = 0
    """For how many waiting requests promotions begin early (``early_lookups.py``)."""
    tier_events_s: float = 0.0
    """Rows that left L1 for a tier are announced in KV events, and asked for again after so many
    seconds (``tier_rows.py``). 0: they are not announced."""
    by_priority: bool = False
    """The engine takes waiting requests in the order of ``Request.precedence``, else as they
    came."""
    adapters: str = ""
    """The engine's settings that change what a LoRA adapter computes."""
    shadow: float = 0.0
    """The share of hits that are loaded and compared while the engine computes all tokens itself
    (``shadow.py``). 0: shadow mode is off."""
    verification: Verification = Verification()
    gpu_stages: bool = False
    """Short pages of a GPU may go through stages (``transfer/staging.py``)."""
    several_nodes: bool = False
    """Ranks may reach other daemons than the scheduler (``nodes.py``)."""
    sync_load_s: float = 0.0
    """The most seconds of copies inside a step (``in_step.py``); 0: all loads are asynchronous."""
    model: str = ""
    """The model's name, for display only. It is no part of the namespace."""
    weights: Future[str] = field(default_factory=Future, compare=False)
    """The name of the weights, the last field of the identity. It may be known at once, later or
    never (``weights.begin``)."""

    @cached_property
    def hits_whole_prompts(self) -> bool:
        """Whether a hit may end at a prompt's last token. Engines compute that token again. A state
        that has it already would have it twice, and blocks before a sliding window may be gone."""
        return all(group.rules.whole for group in self.groups)

    @cached_property
    def spans(self) -> Spans:
        """Which blocks of a request are the rows of its chunks."""
        return Spans(self.groups, self.chunk_tokens, self.window_interval)

    def register(
        self, strategy: ParallelStrategy | None = None, layout: RankLayout | None = None
    ) -> Register:
        """The ``Register`` message of the scheduler, or of the worker with ``strategy`` and
        ``layout``. It is sent once the identity is complete (``when_named``)."""
        chosen = strategy or self.strategy
        registration = chosen.register(
            self.instance, self.identity, self.chunk_tokens, layout, model=self.model
        )
        registration.counted = not self.shadow
        return registration

    @property
    def named(self) -> bool:
        """Whether the name of the weights is known, so that the identity is complete."""
        done = self.weights.done() and not self.weights.cancelled()
        return done and self.weights.exception() is None

    def when_named(self, complete: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``complete`` with the last field of the identity: at once if it is known, else later
        on the thread that computes it."""

        def named(name: Future[str]) -> None:
            if self.named:
                complete({"weights": name.result()})

        self.weights.add_done_callback(named)


def choose_chunk_tokens(wanted: int, unit: int, has_states: bool) -> int:
    """The chunk size in tokens: ``wanted``; if that is 0, the smallest multiple of ``unit`` that is
    at least ``MIN_CHUNK_TOKENS``. ``unit``: the least common multiple of all block sizes and the
    alignment of hits. With state groups the default is one unit: a prompt leaves one state, at its
    last block boundary, and a longer chunk would seldom end there. Raises :class:`ConfigError` if
    ``wanted`` is no multiple of ``unit``."""
    if wanted % unit:
        raise ConfigError(
            f"kvass.chunk_tokens {wanted} does not fit this model: give a multiple of {unit} "
            "(its block sizes and hit alignment)"
        )
    least = unit if has_states else MIN_CHUNK_TOKENS
    return wanted or unit * -(-least // unit)


def log_naming(weights: Future[str], scheduler: bool) -> None:
    """Log that the weights are being named, and later that they are, or why they cannot be."""

    def named(name: Future[str]) -> None:
        if not name.cancelled() and (error := name.exception()) is not None:
            log_off(error, scheduler)
        elif scheduler and not name.cancelled():
            log.warning("the weight files are read: caching begins")

    if scheduler:
        log.warning("the weight files are being read to name them by content; uncached until then")
    weights.add_done_callback(named)
