"""``BlendPlanner``, which plans the segments of a prompt and the tokens to compute.

A file of vLLM's version (see ``adapt.py``). The planner runs in the scheduler. ``blend.py`` makes
vLLM's scheduler follow the plan. ``blend_pages.py`` writes K and V of the segments in the worker.

Laws of this file:

- A request is blended at most once. After a preemption or a failed load vLLM computes the tokens of
  its segments.
- From the block in which its first segment begins, a blended request has block hashes that no other
  request has. vLLM's cache never contains these blocks. So neither vLLM nor kvass uses their KV for
  another prompt or announces it to routers.
- Only chunks that were computed without a segment before them are indexed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvass.blend.place import chunk_keys, place
from kvass.blend.plan import PlacedSegment, Prompt, Selection, all_tokens, plan
from kvass.client.lookups import Match, Pending
from kvass.client.segments import SegmentClient
from kvass.connectors.vllm.adapt import VllmRequest
from kvass.connectors.vllm.blend_pages import Placement, Span
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.engine import identity
from kvass.engine.observers import Observer
from kvass.engine.offers import Offer
from kvass.engine.planner import Planner
from kvass.engine.protocols import Request
from kvass.engine.step_work import Load
from kvass.layout.spans import Table
from kvass.messages import Grant, Granted, Segments
from kvass.types import U32Array


@dataclass
class BlendRequest:
    """The state of a request that may be blended.

    ``tokens``: the prompt. ``space``: as in ``messages.FindSegments``. ``prefix``: the number of
    tokens of the exact prefix; vLLM itself has the first ``local`` of them. ``found``: the daemon's
    answer. ``rows[i]``: the rows of the match that hold the chunks of ``segments[i]``. ``runs``:
    the tokens that are still to be computed, as ranges ``[begin, end)``. ``blended``: whether its
    segments were loaded or are being loaded. ``preemptions``: how often vLLM had preempted it when
    the load was planned. ``searches``: True until vLLM allocates its blocks; segments are searched
    only until then.
    """

    request: VllmRequest
    space: bytes
    tokens: U32Array
    local: int = 0
    prefix: int = -1
    found: Segments | None = None
    rows: list[list[int]] = field(default_factory=list)
    segments: list[PlacedSegment] = field(default_factory=list)
    prompt: Prompt | None = None
    runs: list[tuple[int, int]] = field(default_factory=list)
    blended: bool = False
    searches: bool = True
    preemptions: int = 0


class ChunkIndex(Observer):
    """Has the daemon index the chunks that an engine stores, so that other prompts find them."""

    def __init__(self, segments: SegmentClient, chunk_tokens: int) -> None:
        self._segments, self._chunk = segments, chunk_tokens

    def stored(self, offer: Offer, grant: Grant, granted: Granted) -> None:
        """Index the chunks of an offer."""
        self.add(offer.state.request, offer.item.first, offer.end)

    def add(self, request: Request, first: int, end: int) -> None:
        """Ask the daemon to index chunks ``[first, end)``. It ignores chunks that it does not
        store."""
        assert isinstance(request, VllmRequest)
        space, end = _space(request), min(end, request.hashed_chunks)
        if space is None or first >= end:
            return
        hashes = request.chunk_hashes(first, end)
        before = request.chunk_hashes(first - 1, first)[0] if first else b""
        ids = request.vllm.all_token_ids[first * self._chunk : end * self._chunk]
        tokens, digests = np.asarray(ids, "<u4").tobytes(), b"".join(hashes)
        begin = first * self._chunk
        self._segments.index_chunks(space, digests, len(hashes[0]), tokens, begin, before)


class BlendPlanner:
    """The planner of an engine's blended requests. It calls ``planner`` for their exact prefixes.
    Used from the scheduler's thread only."""

    def __init__(self, setup: VllmSetup, planner: Planner, selection: Selection) -> None:
        self._planner, self._selection, self._oracle = planner, selection, setup.blend_oracle
        self._chunk, self._block = setup.chunk_tokens, setup.hash_tokens
        self._client = planner.client
        self._segments = SegmentClient(planner.client, setup.chunk_tokens)
        self.index = ChunkIndex(self._segments, setup.chunk_tokens)
        self._requests: dict[str, BlendRequest] = {}
        self._placements: list[Placement] = []

    # ------------------------------------------------------------ requests

    def track(self, request: VllmRequest) -> None:
        """Begin to track a new request. One that limits what is loaded gets no segments."""
        if (space := _space(request)) is not None and request.most_loaded_tokens is None:
            tokens = np.asarray(request.vllm.prompt_token_ids, "<u4")
            self._requests[request.name] = BlendRequest(request, space, tokens)

    def forget(self, name: str) -> None:
        self._requests.pop(name, None)
        self._drop_search(name)

    def _drop_search(self, name: str) -> None:
        """Give back the lease on the request's segments and drop pending searches."""
        self._segments.abandon(name)
        self._client.give_back(_segments_name(name))

    def match(self, name: str, local: int) -> int | None:
        """The number of tokens to load after ``local``, or None to call again later, as
        ``Planner.match``.

        With segments it reaches to the end of the last one, and includes tokens that vLLM must
        compute.
        """
        state = self._requests.get(name)
        if state is not None and state.blended:
            if state.request.vllm.num_preemptions > state.preemptions:
                state.runs = []  # the preemption freed its blocks
            return 0
        external = self._planner.match(name, local)
        if external is None or state is None or self._planner.off:
            return external
        if not (state.searches and state.request.reads_cache):
            return external
        if state.prefix != local + external:
            self._drop_search(name)
            state.found, state.prefix = None, local + external
        state.local = local
        if (ready := self._find(state)) is None:
            return None
        return state.segments[-1].new_end - local if ready else external

    def _find(self, state: BlendRequest) -> bool | None:
        """Whether the request has segments; None: call again later. If it has, its segments and
        runs are set and a lease on their rows is held."""
        name, state.segments = state.request.name, []
        width = len(state.request.block_hashes(0, 1)[0]) if state.request.hashed_blocks else 0
        if not width:
            return False
        if state.found is None:
            searched = state.tokens[:-1].tobytes()  # the last token is computed in every case
            found = self._segments.find_segments(name, state.space, searched, width, state.prefix)
            if isinstance(found, Pending):
                return None
            state.found = found
        keys = chunk_keys(state.found, width)
        if not keys:
            return False
        segments_name, digests = _segments_name(name), b"".join(keys)
        match = self._client.match(segments_name, digests, width, 0, state.request.context)
        if isinstance(match, Pending):
            return None
        rows = 0 if match is None else match.chunks
        segments, state.rows = place(state.found, width, self._chunk, rows)
        self._plan(state, segments)
        if not state.segments:
            self._drop_search(name)
        return bool(state.segments)

    def _plan(self, state: BlendRequest, segments: list[PlacedSegment]) -> None:
        """Set the request's segments, and the runs of tokens that are computed with them."""
        chunks, rest = divmod(state.prefix, self._chunk)
        last = state.request.chunk_hashes(chunks - 1, chunks)[0] if chunks and not rest else b""
        state.prompt = Prompt(len(state.tokens), state.prefix, tuple(segments), last)
        select = all_tokens if self._oracle else self._selection
        assert callable(select)
        positions = plan(state.prompt, select)
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        state.runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]
        state.segments = segments  # set last, so that they stay empty if anything above raises

    # ------------------------------------------------------------ blocks

    def allocated(self, name: str, table: Table, external: int) -> int:
        """Plan the load of the request's segments into the blocks of ``table``, which vLLM
        allocated.

        Returns the number of ``external`` tokens for which ``Planner.allocated`` must plan a load:
        with segments, those of the exact prefix.
        """
        state = self._requests.get(name)
        if state is None:
            return external
        blends, state.searches = state.searches and external > 0 and bool(state.segments), False
        if external:
            self.index.add(state.request, 0, state.prefix // self._chunk)
        if not blends:
            self._drop_search(name)
            return external
        state.blended, state.preemptions = True, state.request.vllm.num_preemptions
        self._salt(state.request, state.segments[0].new_start // self._block)
        match = self._client.take(_segments_name(name))
        load, spans = self._load(state, match, table[0])
        prefix = state.prefix - state.local
        loads = (load.request, name) if prefix else (load.request,)
        assert state.prompt is not None
        oracle = (state.prompt, self._selection) if self._oracle else None
        placement = Placement(name, loads, tuple(table[0]), spans, oracle)
        self._placements.append(placement)  # nothing may raise from here on
        self._planner.add_load(load)
        return prefix

    def _salt(self, request: VllmRequest, first: int) -> None:
        """Give the blocks of ``request`` from ``first`` on hashes that no other request has."""
        request.exact_blocks = first
        hashes = request.vllm.block_hashes
        width = len(hashes[0])
        del hashes[first:]
        hashes.append(secrets.token_bytes(width))
        request.vllm.update_block_hashes()

    def _load(
        self, state: BlendRequest, match: Match | None, table: Sequence[int]
    ) -> tuple[Load, tuple[Span, ...]]:
        """The load of the segments' rows, and where each segment is after the load.

        A row that occurs several times is loaded once, for its first segment. Rows are copied into
        whole blocks. If a segment begins inside a block, its rows are copied from the next block
        on, because the first block may contain other tokens before the segment. If the last copied
        block also contains tokens after the segment, they are written later. Without a match for
        all rows, the returned load fails.
        """
        size, name = self._chunk // self._block, _segments_name(state.request.name)
        blocks, spans = dict[int, Sequence[int]](), list[Span]()
        for segment, rows in zip(state.segments, state.rows, strict=True):
            first = -(-segment.new_start // self._block)
            for at, row in enumerate(rows):
                blocks.setdefault(row, table[first + at * size : first + (at + 1) * size])
            held = tuple(i for row in rows for i in blocks[row])
            spans.append(Span(held, segment.old_start, segment.new_start))
        if match is None or sorted(blocks) != list(range(match.chunks)):
            if match is not None:
                self._client.release(match.boot, match.lease)
            return Load(name), tuple(spans)
        copied = tuple(i for row in range(match.chunks) for i in blocks[row])
        load = Load(
            request=name,
            boot=match.boot,
            lease=match.lease,
            given_s=match.given_s,
            deadline_s=match.deadline_s,
            slots=match.slots,
            blocks=(copied,),
            skip=(0,),
            trace=state.request.trace,
        )
        return load, tuple(spans)

    def take_placements(self) -> list[Placement]:
        """The placements since the last call. They go into the step's metadata."""
        placements, self._placements = self._placements, []
        return placements

    def replaced(self, scheduled: Mapping[str, int]) -> list[str]:
        """The requests of a step in which the oracle replaces K and V.

        ``kv_dev`` compares all tokens of a prompt at once. So it skips a prompt that is not
        computed in a single step.
        """
        names = []
        for name in scheduled if self._oracle else ():
            state = self._requests.get(name)
            if state is None or not state.runs:
                continue
            begin, last = state.request.vllm.num_computed_tokens, state.segments[-1].new_end
            whole = begin == state.prefix and begin + scheduled[name] >= last
            if begin < last and (callable(self._selection) or whole):
                names.append(name)
            elif begin < last:
                state.runs = []
                self._planner.traffic.count("blends_failed")
        return names

    # ------------------------------------------------------------ steps

    def loaded(self, name: str, tokens: int, failed: bool) -> int:
        """The first token to compute after the load of a request has ended.

        Without segments, or if their load failed, that is the token after the ``tokens`` that vLLM
        assumes to be loaded.
        """
        state = self._requests.get(name)
        if state is None or not state.blended:
            return tokens
        if failed:
            state.runs = []
            self._planner.traffic.count("blends_failed")
            return tokens
        spared = state.segments[-1].new_end - state.prefix
        spared -= sum(min(end, state.segments[-1].new_end) - begin for begin, end in state.runs)
        self._planner.traffic.count("blends")
        self._planner.traffic.count("blended_tokens", spared)
        return state.runs[0][0]

    def next_token(self, name: str, computed: int) -> int:
        """The next token to compute. Those before ``computed`` are computed or loaded."""
        state = self._requests.get(name)
        if state is None or not state.runs:
            return computed
        while state.runs and state.runs[0][1] <= computed:
            state.runs.pop(0)
        return max(computed, state.runs[0][0]) if state.runs else computed

    def limit(self, name: str, computed: int, tokens: int) -> int:
        """How many tokens from token ``computed`` on one step may compute: at most ``tokens``, and
        only to the end of a run."""
        state = self._requests.get(name)
        runs = state.runs if state is not None and state.blended else []
        return min([tokens, *(end - computed for begin, end in runs if begin <= computed < end)])

    def cacheable(self, name: str, tokens: int) -> int:
        """How many of the first ``tokens`` tokens have exact KV, so that vLLM may cache them."""
        state = self._requests.get(name)
        blocks = None if state is None else state.request.exact_blocks
        return tokens if blocks is None else min(tokens, blocks * self._block)


def _space(request: VllmRequest) -> bytes | None:
    """The request's space: a digest of its cache salt, which must be equal for chunks to be found.
    None if its KV depends on more than its tokens."""
    vllm_request = request.vllm
    embeds = vllm_request.prompt_embeds is not None or vllm_request.prompt_token_ids is None
    if vllm_request.mm_features or embeds:
        return None
    return bytes.fromhex(identity.digest(["vllm", vllm_request.cache_salt or ""]))


def _segments_name(name: str) -> str:
    """The name under which the segments of request ``name`` are looked up and loaded."""
    return f"{name}, segments"
