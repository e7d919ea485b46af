"""``BlendPlanner``, blend in vLLM's scheduler: a prompt's segments, and the tokens to compute.

A file of vLLM's version (see ``adapt.py``). ``blend.py`` has vLLM's scheduler compute what is
planned here, ``blend_pages.py`` puts K and V where they belong.

Laws of this file:

- A request is blended once in its life: after a preemption or a failed load it is computed.
- From the block in which its first segment begins, a blended request has block hashes that no other
  request has, and vLLM's cache never has these blocks. So neither vLLM nor kvass ever gives its KV
  to another prompt, or announces it to routers.
- Only chunks that were computed without a segment before them are indexed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvass.blend.place import chunk_keys, place
from kvass.blend.plan import Choice, PlacedSegment, Prompt, all_tokens, plan
from kvass.client.lookups import Match, Pending
from kvass.client.segments import SegmentClient
from kvass.connectors.vllm.adapt import VllmRequest
from kvass.connectors.vllm.blend_pages import Placement, Span
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.engine import identity
from kvass.engine.planner import Planner
from kvass.engine.protocols import Request
from kvass.engine.step_work import Load
from kvass.layout.spans import Table
from kvass.messages import Segments
from kvass.types import U32Array


@dataclass
class BlendRequest:
    """``prefix``: tokens of the exact prefix, of which vLLM has ``local``. ``rows``: of each of the
    ``segments``, where its chunks stand in the match. ``runs``: what is still to be computed, in
    tokens ``[begin, end)``. ``blended``: its segments were, or are being, loaded, after so many
    ``preemptions``. ``searches``: it had no blocks yet."""

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


class BlendPlanner:
    """Plans the blended requests of one engine, around its ``planner``. Used from the scheduler's
    thread only."""

    def __init__(self, setup: VllmSetup, planner: Planner, choice: Choice) -> None:
        self._planner, self._choice, self._oracle = planner, choice, setup.blend_oracle
        self._chunk, self._block = setup.chunk_tokens, setup.hash_tokens
        self._client = planner.client
        self._segments = SegmentClient(planner.client, setup.chunk_tokens)
        self._requests: dict[str, BlendRequest] = {}
        self._placements: list[Placement] = []
        planner.when_answered = self._index

    # ------------------------------------------------------------ requests

    def track(self, request: VllmRequest) -> None:
        """A request begins."""
        if (space := _space(request)) is not None:
            tokens = np.asarray(request.vllm.prompt_token_ids, "<u4")
            self._requests[request.name] = BlendRequest(request, space, tokens)

    def forget(self, name: str) -> None:
        """A request ended."""
        self._requests.pop(name, None)
        self._settle(name)

    def _settle(self, name: str) -> None:
        self._segments.abandon(name)
        self._client.settle(_second(name))

    def match(self, name: str, local: int) -> int | None:
        """As ``Planner.match``, with segments: then what is loaded ends with the last of them, and
        has tokens in it that are to be computed."""
        one = self._requests.get(name)
        if one is not None and one.blended:
            if one.request.vllm.num_preemptions > one.preemptions:
                one.runs = []  # its blocks are gone
            return 0
        external = self._planner.match(name, local)
        if external is None or one is None or not (one.searches and one.request.reads_cache):
            return external
        if one.prefix != local + external:
            self._settle(name)
            one.found, one.prefix = None, local + external
        one.local = local
        if (ready := self._find(one)) is None:
            return None
        return one.segments[-1].new_end - local if ready else external

    def _find(self, one: BlendRequest) -> bool | None:
        """Whether it has segments: then these and the runs are known, and the rows are leased.
        None: ask again later."""
        name, one.segments = one.request.name, []
        width = len(one.request.block_hashes(0, 1)[0]) if one.request.hashed_blocks else 0
        if not width:
            return False
        if one.found is None:
            searched = one.tokens[:-1].tobytes()  # the last token is computed in every case
            found = self._segments.find_segments(name, one.space, searched, width, one.prefix)
            if isinstance(found, Pending):
                return None
            one.found = found
        keys = chunk_keys(one.found, width)
        if not keys:
            return False
        tenant = one.request.tenant
        match = self._client.match(_second(name), b"".join(keys), width, 0, 0.0, tenant)
        if isinstance(match, Pending):
            return None
        rows = 0 if match is None else match.chunks
        segments, one.rows = place(one.found, width, self._chunk, rows)
        self._plan(one, segments)
        if not one.segments:
            self._settle(name)
        return bool(one.segments)

    def _plan(self, one: BlendRequest, segments: list[PlacedSegment]) -> None:
        """What is computed of a request with these segments: its runs."""
        chunks, rest = divmod(one.prefix, self._chunk)
        last = one.request.chunk_hashes(chunks - 1, chunks)[0] if chunks and not rest else b""
        one.prompt = Prompt(len(one.tokens), one.prefix, tuple(segments), last)
        select = all_tokens if self._oracle else self._choice
        assert callable(select)
        positions = plan(one.prompt, select)
        cuts = np.flatnonzero(np.diff(positions) != 1) + 1
        one.runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]
        one.segments = segments  # last: nothing above raised

    # ------------------------------------------------------------ blocks

    def allocated(self, name: str, table: Table, external: int) -> int:
        """The request has the blocks of ``table``: plan the load of its segments. Returns how many
        of the ``external`` tokens are left to ``Planner.allocated``: those of the exact prefix."""
        one = self._requests.get(name)
        if one is None:
            return external
        blends, one.searches = one.searches and external > 0 and bool(one.segments), False
        if external:
            self._index(one.request, 0, one.prefix // self._chunk)
        if not blends:
            self._settle(name)
            return external
        one.blended, one.preemptions = True, one.request.vllm.num_preemptions
        self._salt(one.request, one.segments[0].new_start // self._block)
        match = self._client.take(_second(name))
        load, spans = self._load(one, match, table[0])
        prefix = one.prefix - one.local
        loads = (load.request, name) if prefix else (load.request,)
        assert one.prompt is not None
        oracle = (one.prompt, self._choice) if self._oracle else None
        placement = Placement(name, loads, tuple(table[0]), spans, oracle)
        self._placements.append(placement)  # from here on nothing may raise
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
        self, one: BlendRequest, match: Match | None, table: Sequence[int]
    ) -> tuple[Load, tuple[Span, ...]]:
        """The copy of the rows: each into whole blocks of the place where it comes first. Of a
        segment that begins inside of a block these are the next ones: the block may have tokens of
        others before it, and what follows in the last one is written later."""
        size, name = self._chunk // self._block, _second(one.request.name)
        blocks, spans = dict[int, Sequence[int]](), list[Span]()
        for segment, rows in zip(one.segments, one.rows, strict=True):
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
            trace=one.request.trace,
        )
        return load, tuple(spans)

    def take_placements(self) -> list[Placement]:
        """What was planned since the last call, for the step's metadata."""
        placements, self._placements = self._placements, []
        return placements

    def replaced(self, scheduled: Mapping[str, int]) -> list[str]:
        """In which of the requests of a step the oracle replaces K and V. ``kv_dev`` chooses among
        all tokens at once: a prompt that is not computed in one step is left as it is."""
        names = []
        for name in scheduled if self._oracle else ():
            one = self._requests.get(name)
            if one is None or not one.runs:
                continue
            begin, last = one.request.vllm.num_computed_tokens, one.segments[-1].new_end
            whole = begin == one.prefix and begin + scheduled[name] >= last
            if begin < last and (callable(self._choice) or whole):
                names.append(name)
            elif begin < last:
                one.runs = []
                self._planner.traffic.count("blends_failed")
        return names

    # ------------------------------------------------------------ steps

    def loaded(self, name: str, tokens: int, failed: bool) -> int:
        """The load of a request ended: the token at which it is computed on. Without segments, or
        if they are lost, that is after the ``tokens`` that vLLM takes for loaded."""
        one = self._requests.get(name)
        if one is None or not one.blended:
            return tokens
        if failed:
            one.runs = []
            self._planner.traffic.count("blends_failed")
            return tokens
        spared = one.segments[-1].new_end - one.prefix
        spared -= sum(min(end, one.segments[-1].new_end) - begin for begin, end in one.runs)
        self._planner.traffic.count("blends")
        self._planner.traffic.count("blended_tokens", spared)
        return one.runs[0][0]

    def next_token(self, name: str, computed: int) -> int:
        """Where a request is computed on that is computed up to token ``computed``."""
        one = self._requests.get(name)
        if one is None or not one.runs:
            return computed
        while one.runs and one.runs[0][1] <= computed:
            one.runs.pop(0)
        return max(computed, one.runs[0][0]) if one.runs else computed

    def limit(self, name: str, computed: int, tokens: int) -> int:
        """How many of ``tokens`` may be computed from token ``computed`` on in one step."""
        one = self._requests.get(name)
        runs = one.runs if one is not None and one.blended else []
        return min([tokens, *(end - computed for begin, end in runs if begin <= computed < end)])

    def cacheable(self, name: str, tokens: int) -> int:
        """How many of the first ``tokens`` of a request are exact, and may be in vLLM's cache."""
        one = self._requests.get(name)
        blocks = None if one is None else one.request.exact_blocks
        return tokens if blocks is None else min(tokens, blocks * self._block)

    # ------------------------------------------------------------ index

    def _index(self, request: Request, first: int, end: int) -> None:
        """Have chunks ``[first, end)`` found in other prompts; the daemon leaves out those that it
        does not have."""
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


def _space(request: VllmRequest) -> bytes | None:
    """What else must be alike for its chunks to be found; None: its KV depends on more than its
    tokens."""
    theirs = request.vllm
    embeds = theirs.prompt_embeds is not None or theirs.prompt_token_ids is None
    if theirs.mm_features or embeds:
        return None
    return bytes.fromhex(identity.digest(["vllm", theirs.cache_salt or ""]))


def _second(name: str) -> str:
    """The name of the lookup and of the load of a request's segments."""
    return f"{name}, segments"
