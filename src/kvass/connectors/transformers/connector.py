"""``generate`` with a shared cache: a stored prefix is loaded, the rest is computed.

Laws of this file:

- No failure of kvass reaches a call of ``generate``: it is a miss, counted in ``counters``. Only
  wrong arguments raise, before anything runs.
- Nothing is stored that was computed in another state of the model than the namespace says, nor
  what was computed with segments before it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Self

from kvass.blend.plan import Prompt, Selection, Selector, parse
from kvass.connectors.transformers import identity
from kvass.connectors.transformers import model as models
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.kv_store import Hashed, KVStore
from kvass.connectors.transformers.rows import BLOCK, KV, Rows
from kvass.engine.boundary import Boundary, log
from kvass.engine.setup import choose_chunk_tokens
from kvass.engine.ttl import ttl_seconds
from kvass.errors import ConfigError, UsageError
from kvass.messages import RequestContext
from kvass.types import DEFAULT_TENANT, MAX_BLOCKS, is_tenant_name, session_tag


@dataclass(frozen=True)
class Reuse:
    """What the last call reused, in tokens. ``prompt``: its length. ``loaded``: the prefix.
    ``blended``: in segments. ``recomputed``: tokens of segments that were computed again.
    ``stored``: tokens that were new to the daemon."""

    prompt: int = 0
    loaded: int = 0
    stored: int = 0
    blended: int = 0
    recomputed: int = 0


@dataclass
class Cached:
    """K and V that a call begins with. Only tokens before ``exact`` may be stored; None: all."""

    kv: KV
    reuse: Reuse
    exact: int | None = None


def _context(session: str, ttl: str | float | None, tenant: str) -> tuple[RequestContext, bool]:
    """What a call says of itself, and whether its session ends with it. Raises ``UsageError`` for a
    wrong ``ttl`` or ``tenant``."""
    if not is_tenant_name(tenant or DEFAULT_TENANT):
        raise UsageError(f"tenant {tenant[:64]!r}: use 1 to 64 letters, digits, '.', '_', '-'")
    seconds = ttl_seconds(ttl)
    if seconds is None and ttl is not None:
        raise UsageError(f"ttl {ttl!r}: 0, seconds up to 86400, or a text like 5m or 1h")
    tag, ends = 0, seconds == 0
    if session:
        tag = session_tag(session, tenant)
    elif ends:
        tag = session_tag(uuid.uuid4().hex, tenant, "request")
    return RequestContext(tenant=tenant, session=tag, keep_s=seconds or 0.0), ends


def connect(
    model: Any,
    *,
    socket: str = "",
    daemon_uid: int | None = None,
    chunk_tokens: int = 0,
    tag: str = "",
    blend: str | Selector = "",
    wait_s: float = 2.0,
) -> CachedModel:
    """Connect a causal language model of transformers to the daemon at ``socket``, by default
    that of ``KVASS_SOCKET``. ``daemon_uid``: its user, if that is another one (docs/operating.md).
    ``tag``: models with another share nothing with it. ``blend``: reuse
    chunks that are no prefix, too, and compute some of their tokens again: ``first_k:TOKENS``,
    ``kv_dev:RATIO``, ``all`` or ``none``.

    Reads all weights once, to name them by content (0.5 to 2 GB/s and core), and computes two
    prompts of four tokens. Waits up to ``wait_s`` for the daemon; without one calls run uncached
    until it comes. Raises ``UsageError`` for a model that cannot be cached, with the reason.
    """
    chunk_tokens = choose_chunk_tokens(chunk_tokens, BLOCK, has_states=False)
    if not BLOCK < chunk_tokens <= BLOCK * MAX_BLOCKS:
        raise ConfigError(f"chunk_tokens {chunk_tokens}: give {2 * BLOCK} to {BLOCK * MAX_BLOCKS}")
    selection = parse(blend) if blend else None
    rows = Rows(models.probe(model), chunk_tokens)
    blender = Blender(model) if selection is not None else None
    before, began_s = identity.state(model), time.monotonic()
    fields = identity.describe(model, rows, tag)
    log.info("the weights were named by content in %.1f s", time.monotonic() - began_s)
    path = socket or os.environ.get("KVASS_SOCKET", "")
    name, boundary = str(model.config._name_or_path or type(model).__name__), Boundary()
    store = KVStore(path, rows, fields, name, boundary, daemon_uid)
    cached = CachedModel(model, before, store, boundary, blender, selection)
    cached.wait_connected(wait_s)
    return cached


class CachedModel:
    """A model and its connection. Used from one thread. ``last``: what the last call reused;
    ``counters``: failures, by name."""

    def __init__(
        self,
        model: Any,
        state: object,
        store: KVStore,
        boundary: Boundary,
        blender: Blender | None,
        selection: Selection | None,
    ) -> None:
        """``state``: of the model when it was named."""
        self.model = model
        self.last = Reuse()
        self._state = state
        self._store, self._boundary = store, boundary
        self._blender, self._selection = blender, selection

    @property
    def counters(self) -> Counter[str]:
        return self._boundary.counters

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the daemon. Returns whether it is connected."""
        return self._store.wait_connected(timeout_s)

    def close(self) -> None:
        """End the connection. The model is as it was."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        input_ids: Any,
        *,
        salt: str = "",
        tenant: str = "",
        blend: str | Selector | None = None,
        store_answer: bool = True,
        session: str = "",
        ttl: str | float | None = None,
        **arguments: Any,
    ) -> Any:
        """``model.generate(input_ids, **arguments)`` for one prompt, with the longest stored prefix
        loaded; then stores what is new, the answer too with ``store_answer``.

        Prompts of another ``salt`` share nothing. ``tenant`` pays for what is stored. ``blend`` as
        of ``connect``, for this call; empty: none. ``session`` names the client's session; ``ttl``
        says that it ends (0) or for how long the rows stay (docs/hints.md). Raises ``UsageError``
        for arguments with which a prefix cannot be reused, and for a wrong ``ttl`` or ``tenant``.
        """
        models.check_call(self.model, input_ids, arguments)
        context, ends = _context(session, ttl, tenant)
        selection = self._selection if blend is None else (parse(blend) if blend else None)
        if selection is not None and self._blender is None:
            raise UsageError("blend was not prepared: give connect a blend, too")
        usable, begin = self._unchanged(), None
        self._store.context = context
        if usable:
            begin = self._boundary.run(None, self._begin, input_ids, salt, selection)
        begin = begin or Cached([], Reuse(input_ids.shape[1]))
        self.last = begin.reuse
        cache = models.new_cache(self.model)
        if begin.kv:
            cache = models.filled(self.model, begin.kv)
        output = self.model.generate(input_ids, past_key_values=cache, **arguments)
        if usable and self._unchanged():
            whole = getattr(output, "sequences", output) if store_answer else input_ids
            tokens = whole[0, : cache.get_seq_length()].tolist()[: begin.exact]
            saved = self._boundary.run(0, self._save, tokens, salt, cache, begin)
            self.last = replace(begin.reuse, stored=saved)
        if ends:
            self._boundary.run(None, self._store.end_session)
        return output

    def add(self, input_ids: Any, *, salt: str = "", tenant: str = "") -> int:
        """Compute a document and store it, so that prompts may blend it: without the special tokens
        that begin a prompt. Returns how many of its tokens can be found now: those of whole chunks,
        if there is a daemon and room. Raises ``UsageError`` as ``generate``, and if ``connect`` was
        given no blend."""
        if self._blender is None:
            raise UsageError("only blend finds a document: give connect a blend")
        self.generate(
            input_ids, salt=salt, tenant=tenant, blend="", store_answer=False, max_new_tokens=1
        )
        return self._boundary.run(0, self._found, input_ids, salt, self._blender.space(salt))

    def _found(self, ids: Any, salt: str, space: bytes) -> int:
        """Index a stored document. Returns how many of its tokens a search finds."""
        known = Hashed(ids[0].tolist(), salt)
        self._store.index(known, space, 0)
        found = self._store.find(known.tokens, space)
        return sum(segment.length for segment in found.segments)

    def _unchanged(self) -> bool:
        """Whether the model computes now what its namespace says."""
        why = models.passing_state(self.model)
        if self._state != identity.state(self.model):
            why = "its weights, settings or code were changed after connect: connect again"
        if why:
            self._boundary.count("changed", "this call runs uncached: %s", why)
        return not why

    def _begin(self, ids: Any, salt: str, selection: Selection | None) -> Cached | None:
        """Load a prompt's prefix and segments, and blend these. None: nothing was loaded."""
        prompt = Hashed(ids[0].tolist(), salt)
        kv, loaded = self._store.prefix(prompt, selection is not None)
        reuse = Reuse(ids.shape[1], loaded)
        if selection is not None and self._blender is not None:
            space = self._blender.space(salt)
            segments = self._store.segments(prompt, space, loaded, kv)
            if segments:
                self._blender.move(kv, segments)
                last = prompt.blocks[loaded // BLOCK - 1] if loaded else b""
                stands = Prompt(ids.shape[1], loaded, segments, last)
                again = self._blender.recompute(ids, kv, stands, selection)
                blended = sum(segment.length for segment in segments)
                reuse = replace(reuse, blended=blended, recomputed=again)
                return Cached(kv, reuse, exact=segments[0].new_start)
        return Cached([tensor[:, :, :loaded] for tensor in kv], reuse) if loaded else None

    def _save(self, tokens: list[int], salt: str, cache: Any, begin: Cached) -> int:
        """Store what a call computed and index its chunks. Returns how many tokens were new."""
        known, loaded = Hashed(tokens, salt), begin.reuse.loaded
        stored = self._store.save(known, models.tensors_of(cache), loaded)
        if stored and self._blender is not None:
            self._store.index(known, self._blender.space(salt), loaded)
        return stored
