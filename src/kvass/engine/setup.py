"""What both sides of a connector know of their engine: read once, at start, in each process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from kvass.client.parallel import ParallelStrategy
from kvass.engine.boundary import log, log_off
from kvass.errors import ConfigError
from kvass.messages import Register
from kvass.types import GroupLayout, RankLayout

MIN_CHUNK_TOKENS: Final = 256


@dataclass(frozen=True)
class Inert:
    """Why the engine must run uncached here."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """Sizes in tokens, lists by group id. The layers named in ``groups`` are those of one rank:
    only a worker knows its own. ``strategy`` is the scheduler's; a worker's is at its rank."""

    socket: str
    instance: str
    identity: Mapping[str, str]
    strategy: ParallelStrategy
    chunk_tokens: int
    groups: tuple[GroupLayout, ...]
    loads: bool
    stores: bool
    daemon_uid: int | None = None
    """The daemon's user, where the files do not show it (``wire.trust``)."""
    single_copies: bool = False
    """On a GPU: a call of the driver per run."""
    chunk_blocks: int = 0
    """Blocks of a chunk, if hits may end at each of them: all groups are ``full``, with one block
    size, and each block has a hash. 0: hits end with a chunk."""
    spare: int = 0
    """Chunks that must be cached after a hit (``messages.Lookup``)."""
    fixed_weights: bool = False
    """A reset of the engine's cache never means that its weights were replaced."""
    one_queue: bool = False
    """The engine stops at the first waiting request without room, also before requests that hold
    blocks because their load has ended (``head_of_line.py``)."""
    adapters: str = ""
    """Settings that change what a LoRA adapter computes."""
    model: str = ""
    """The model's name for people: no part of the namespace."""
    weights: Future[str] = field(default_factory=Future, compare=False)
    """The last field of the identity: known now, later, or never (``weights.begin``)."""

    @cached_property
    def hits_whole_prompts(self) -> bool:
        """Whether a hit may end at a prompt's last token. Engines compute that token again: a state
        that contains it would count it twice, and the blocks before a window may be gone."""
        return all(group.kind == "full" for group in self.groups)

    def register(
        self, strategy: ParallelStrategy | None = None, layout: RankLayout | None = None
    ) -> Register:
        """How the scheduler, or the worker of ``strategy`` and ``layout``, registers, once its
        identity is complete (``when_named``)."""
        chosen = strategy or self.strategy
        return chosen.register(
            self.instance, self.identity, self.chunk_tokens, layout, model=self.model
        )

    @property
    def named(self) -> bool:
        """Whether the identity is complete."""
        done = self.weights.done() and not self.weights.cancelled()
        return done and self.weights.exception() is None

    def when_named(self, complete: Callable[[Mapping[str, str]], None]) -> None:
        """Call ``complete`` with the rest of the identity: now, or on the thread that finds it."""

        def named(name: Future[str]) -> None:
            if self.named:
                complete({"weights": name.result()})

        self.weights.add_done_callback(named)


def choose_chunk_tokens(wanted: int, unit: int, has_states: bool) -> int:
    """The chunk size: ``wanted``, or if that is 0 the smallest multiple of ``unit`` of at least
    ``MIN_CHUNK_TOKENS``. ``unit``: the lcm of all block sizes and the alignment of hits. With
    states it is one unit: a prompt leaves one state behind, at its last block boundary, where a
    longer chunk would mostly not end. Raises :class:`ConfigError` if ``wanted`` is no multiple."""
    if wanted % unit:
        raise ConfigError(
            f"kvass.chunk_tokens {wanted} does not fit this model: give a multiple of {unit} "
            "(its block sizes and hit alignment)"
        )
    least = unit if has_states else MIN_CHUNK_TOKENS
    return wanted or unit * -(-least // unit)


def log_naming(weights: Future[str], scheduler: bool) -> None:
    """Log when the weights' name is known, or why it will not be."""

    def named(name: Future[str]) -> None:
        if not name.cancelled() and (error := name.exception()) is not None:
            log_off(error, scheduler)
        elif scheduler and not name.cancelled():
            log.warning("the weight files are read: caching begins")

    if scheduler:
        log.warning("the weight files are being read to name them by content; uncached until then")
    weights.add_done_callback(named)
