"""Traces: requests in order of time, each with the ids of its prompt's pieces.

A *piece* is ``piece_tokens`` tokens of a prompt. Equal ids mean that the prompts are equal up to
the piece's end, as with vLLM's block hashes. There are three file formats:

- ``mooncake``: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and
  ``hash_ids``, one per 512 tokens (https://github.com/kvcache-ai/Mooncake, FAST25-release).
- ``csv``: a header, then ``time_s,input_tokens,output_tokens,prefix_id,prefix_tokens``. Prompts
  with one ``prefix_id`` have their first ``prefix_tokens`` tokens in common.
- A recording of ``kvass serve --record`` (``kvass/recording.py``).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Final

import msgspec
import numpy as np

from kvass.errors import UsageError
from kvass.recording import KEY_BYTES, AnyLine, EngineLine, LookupLine, LostLine
from kvass.types import U64Array

MOONCAKE_TOKENS: Final = 512
CSV_TOKENS: Final = 16
MOST_WRONG: Final = 100
"""The most lines of a trace that may be wrong. They are skipped and counted."""
MOST_TOKENS: Final = 16 << 20
"""The most tokens of a prompt."""
_LINE_CHARS: Final = 4 << 20
NEVER: Final = 1 << 40
_PROMPTS: Final = 10_000
"""The number of requests whose last lookup is remembered."""
_CSV: Final = ("time_s", "input_tokens", "output_tokens", "prefix_id", "prefix_tokens")


class WrongLine(ValueError):
    """A line of a trace is not a request. The text says why."""


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace.

    ``pieces``: the ids of the whole pieces of its prompt, uint64. ``part``: the id of the partial
    piece after them, if it is known. ``rest``: in a recording, the keys of the blocks after the
    last chunk. ``first``: -1 if the prompt is looked up, and the chunks that are not found are
    stored; ``NEVER`` if it is only looked up; else it is only stored, from this chunk on.
    ``groups``: a bit mask of the layer groups that are stored; 0: all. ``session``: the tag of its
    client's session; 0: not known. ``ends``: it says that its session ends with it (``hints.py``).
    """

    time_s: float
    input_tokens: int
    output_tokens: int
    pieces: U64Array
    engine: int = 0
    name: int = 0
    first: int = -1
    groups: int = 0
    part: int | None = None
    rest: U64Array | None = None
    session: int = 0
    ends: bool = False

    @property
    def all_pieces(self) -> U64Array:
        """The ids of its pieces, including the partial one."""
        part = () if self.part is None else (self.part,)
        return np.append(self.pieces, np.array(part, np.uint64))

    @property
    def looks_up(self) -> bool:
        return self.first in (-1, NEVER)


@dataclass
class Trace:
    """The requests of a file.

    ``wrong``: how many lines were skipped; ``why`` says why the first few were. ``engines``: in a
    recording, what each engine registered; a piece is then a chunk. ``blocks``: by engine and chunk
    the keys of the chunk's blocks, if the recording has them.
    """

    name: str
    piece_tokens: int
    requests: list[TraceRequest] = field(default_factory=list)
    wrong: int = 0
    why: list[str] = field(default_factory=list)
    engines: dict[int, EngineLine] = field(default_factory=dict)
    blocks: dict[tuple[int, int], U64Array] = field(default_factory=dict)

    @property
    def asking(self) -> list[TraceRequest]:
        return [request for request in self.requests if request.looks_up]

    @property
    def input_tokens(self) -> int:
        return sum(r.input_tokens for r in self.asking)

    @property
    def unique_tokens(self) -> int:
        """The tokens of all distinct pieces: those that a cache that evicts nothing holds at the
        end."""
        return sum(
            len(np.unique(np.concatenate([r.pieces for r in self.requests if r.engine == engine])))
            * self.tokens_of(engine)
            for engine in {r.engine for r in self.requests}
        )

    def tokens_of(self, engine: int) -> int:
        return self.engines[engine].chunk_tokens if self.engines else self.piece_tokens

    @property
    def seconds(self) -> float:
        return self.requests[-1].time_s - self.requests[0].time_s if self.requests else 0.0


def read(path: Path) -> Trace:
    """The trace in a file. Raises ``UsageError`` if it cannot be read, is empty, or more
    than ``MOST_WRONG`` of its lines are wrong."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = _lines(file, path)
            first = next(lines, "")
            lines = chain([first], lines)
            is_csv = first.strip().startswith("time_s")
            trace = Trace(path.name, CSV_TOKENS if is_csv else MOONCAKE_TOKENS)
            if is_csv:
                found = _csv(lines)
            elif first.startswith('{"kind":'):
                found = _recorded(lines, trace)
            else:
                found = _mooncake(lines)
            for number, request in found:
                _take(trace, number, request)
    except OSError as error:
        raise UsageError(f"trace {path}: {error.strerror}") from error
    if not trace.requests:
        why = f": {trace.why[0]}" if trace.why else ""
        raise UsageError(f"trace {path}: it has no requests{why}")
    return trace


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a file. Raises ``UsageError`` for a line that is too long."""
    while line := file.readline(_LINE_CHARS):
        if len(line) == _LINE_CHARS:
            raise UsageError(f"trace {path}: a line has more than {_LINE_CHARS} characters")
        yield line


def _take(trace: Trace, number: int, found: TraceRequest | WrongLine) -> None:
    if isinstance(found, TraceRequest) and found.time_s < 0:
        found = WrongLine(f"its time {found.time_s:g} s is negative")
    if isinstance(found, TraceRequest):
        if not trace.requests or found.time_s >= trace.requests[-1].time_s:
            trace.requests.append(found)
            return
        found = WrongLine(f"its time {found.time_s:g} s is before that of the line before")
    trace.wrong += 1
    if len(trace.why) < 5:
        trace.why.append(f"line {number}: {found}")
    if trace.wrong > MOST_WRONG:
        raise UsageError(
            f"trace {trace.name}: {trace.wrong} lines are wrong, the first: {trace.why[0]}"
        )


def _mooncake(lines: Iterable[str]) -> Iterator[tuple[int, TraceRequest | WrongLine]]:
    before: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, _mooncake_request(line, before)
        except WrongLine as wrong:
            yield number, wrong


def _mooncake_request(line: str, before: dict[int, int]) -> TraceRequest:
    """The request of a line. ``before`` maps each id so far to the id before it, or to -1."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise WrongLine("it is no JSON") from None
    if not isinstance(fields, dict):
        raise WrongLine("it is no JSON object")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 63 for i in ids):
        raise WrongLine("hash_ids is no list of numbers from 0 on")
    for last, each in pairwise((-1, *ids)):
        if (other := before.setdefault(each, last)) != last:
            found, was = ("nothing" if one < 0 else one for one in (last, other))
            raise WrongLine(
                f"hash_ids: {each} follows {found} here, and {was} before; equal ids must mean "
                "equal prompts up to there"
            )
    time_ms, input_tokens, output_tokens = (
        _number(fields, name) for name in ("timestamp", "input_length", "output_length")
    )
    whole = min(len(ids), int(input_tokens) // MOONCAKE_TOKENS)
    part = ids[whole] if whole < len(ids) and input_tokens % MOONCAKE_TOKENS else None
    return TraceRequest(
        time_ms / 1000,
        int(input_tokens),
        int(output_tokens),
        np.array(ids[:whole], np.uint64),
        part=part,
    )


def _number(fields: dict[str, object], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    limit = MOST_TOKENS if name.endswith(("length", "tokens")) else 1e15
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= limit:
        raise WrongLine(f"{name} is no number from 0 to {limit:g}")
    return float(value)


def _recorded(lines: Iterable[str], trace: Trace) -> Iterator[tuple[int, TraceRequest | WrongLine]]:
    """The requests of a recording. A store's line has no keys of the chunks before it; they are
    those of the request's lookup."""
    decoder, engines = msgspec.json.Decoder(AnyLine), trace.engines
    prompts: dict[tuple[int, int], U64Array] = {}
    for number, text in enumerate(lines, 1):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            yield number, WrongLine("it is no line of a recording")
            continue
        if isinstance(line, EngineLine):
            engines[line.engine] = line
        elif isinstance(line, LostLine):
            yield number, WrongLine(f"{line.messages} messages are missing before it")
        elif line.engine not in engines or (len(line.keys) | len(line.blocks)) % KEY_BYTES:
            yield number, WrongLine("its engine is not known, or its keys are not whole")
        else:
            keys, name = np.frombuffer(line.keys, np.uint64), (line.engine, line.request)
            before = prompts.get(name, keys[:0])
            rest, engine = np.frombuffer(line.blocks, np.uint64), engines[line.engine]
            block_tokens = engine.groups[0].block_tokens if engine.groups else 0
            each = max(1, engine.chunk_tokens // max(1, block_tokens))
            if isinstance(line, LookupLine):
                tokens = len(keys) * engine.chunk_tokens + len(rest) * block_tokens
                prompts[name] = keys
                yield (
                    number,
                    TraceRequest(
                        line.t, tokens, 0, keys, line.engine, line.request, NEVER, rest=rest
                    ),
                )
            elif not 0 <= line.first <= len(before):
                yield number, WrongLine("a store of a request that was not looked up")
            elif line.groups >> len(engines[line.engine].groups):
                yield number, WrongLine("a store of groups that its engine does not have")
            elif len(rest) and len(rest) // each != len(keys):
                yield number, WrongLine("a store of other blocks than its chunks have")
            else:
                for i, key in enumerate(keys.tolist() if len(rest) else ()):
                    trace.blocks[line.engine, key] = rest[i * each : (i + 1) * each]
                rest = rest[len(keys) * each :]
                keys = prompts[name] = np.concatenate([before[: line.first], keys])
                yield (
                    number,
                    TraceRequest(
                        line.t,
                        0,
                        0,
                        keys,
                        line.engine,
                        line.request,
                        line.first,
                        line.groups,
                        rest=rest,
                    ),
                )
            if len(prompts) > _PROMPTS:
                del prompts[next(iter(prompts))]


def _csv(lines: Iterable[str]) -> Iterator[tuple[int, TraceRequest | WrongLine]]:
    rows = csv.DictReader(lines)
    prefixes: dict[str, int] = {}
    try:
        if tuple(rows.fieldnames or ())[: len(_CSV)] != _CSV:
            raise UsageError(f"trace: the columns of a CSV file are {','.join(_CSV)}")
        for count, row in enumerate(rows):
            try:
                yield rows.line_num, _csv_request(row, prefixes, count)
            except WrongLine as wrong:
                yield rows.line_num, wrong
    except csv.Error as error:
        raise UsageError(f"trace: line {rows.line_num} is no CSV: {error}") from None


def _csv_request(row: dict[str, object], prefixes: dict[str, int], count: int) -> TraceRequest:
    """The request of a line. The ids of a prefix's pieces follow from its ``prefix_id``; the ids of
    all other pieces belong to this request alone."""
    time_s, input_tokens, output_tokens, shared = (
        _number(row, name) for name in _CSV if name != "prefix_id"
    )
    if shared > input_tokens:
        raise WrongLine("prefix_tokens is more than input_tokens")
    name = str(row.get("prefix_id") or "")
    prefix = prefixes.setdefault(name, len(prefixes)) if name else 0
    whole, common = int(input_tokens) // CSV_TOKENS, int(shared) // CSV_TOKENS if name else 0
    pieces = np.arange(whole, dtype=np.uint64)
    pieces[:common] += np.uint64(prefix << 21 | 1 << 62)
    pieces[common:] += np.uint64(count << 21)
    return TraceRequest(time_s, int(input_tokens), int(output_tokens), pieces)
