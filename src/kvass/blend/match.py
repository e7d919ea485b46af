"""An index of chunks that finds them at any offset of a prompt.

``H(i) = sum_j m(x[i+j]) B^(k-1-j) mod 2^64`` is the rolling hash of the ``k`` tokens from ``i`` on
(Karp and Rabin 1987). ``m`` mixes a token's bits. One prefix sum gives the hashes of all offsets,
because ``B`` is odd and has an inverse: ``H(i) = B^(i+k-1) (S[i+k] - S[i])``, with
``S[n] = sum_i<n m(x[i]) B^-i``.
``B`` is secret, but for long chunks there are pairs of texts that collide for every ``B``
(Thue-Morse). So a hash only says where to look, and the tokens of each match are compared.

The table is set-associative: a hash has a bucket of ``WAYS`` entries. If the bucket is full, or the
whole index is, a new entry replaces one that was used long ago. So memory is bounded. A text that
is stored under many keys is found under the last few. Memory that was never touched costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.types import KEY_WORDS, I64Array, U32Array, U64Array

WAYS: Final = 8
_CELLS: Final = 16
"""Cells of the filter per bucket. Of the offsets at which no known chunk stands, at most one in
16 passes the filter."""
_BLOCK: Final = 8192
_DENSE: Final = 64
_PERIOD: Final = 8
"""Known chunks at ``_DENSE`` consecutive offsets occur only in a text that repeats itself. Looking
at all these offsets would take too long. Of each chunk there ``_PERIOD`` offsets are looked at, the
last offset, and those at which a document would go on that stands beside the repetition."""
_ROUNDS: Final = 3
"""How often offsets are chosen anew if the chunks at some of them turn out not to match."""
_SAMPLE: Final = 64
"""How many entries are compared to find those that were used longest ago; four more for each entry
that has to be removed."""
_ENTRY_BYTES: Final = 224
"""Bytes of an entry without its tokens, with its share of the tables of a full matcher."""

BoolArray = npt.NDArray[np.bool_]
Usable = Callable[[I64Array], BoolArray]


class Run(NamedTuple):
    """Entries that follow each other in the prompt from ``new_start`` on, as they did when they
    were stored."""

    new_start: int
    ids: list[int]


class Chunks(NamedTuple):
    """``n`` chunks to be added. ``tokens`` has shape ``(n, chunk_tokens)``. ``keys`` are their
    keys, and ``before`` those of the chunks before them, zero if there is none: ``(n, KEY_WORDS)``.
    ``starts`` are the positions of their first tokens."""

    tokens: U32Array
    keys: U64Array
    before: U64Array
    starts: I64Array

    def of(self, which: I64Array | BoolArray) -> Chunks:
        return Chunks(self.tokens[which], self.keys[which], self.before[which], self.starts[which])


def entry_bytes(chunk_tokens: int) -> int:
    """Memory of one entry."""
    return 4 * chunk_tokens + _ENTRY_BYTES


class ChunkMatcher:
    """An index of at most ``capacity`` chunks of ``chunk_tokens`` tokens.

    An entry belongs to a *place*, which is a number above 0, and to a *space* in it, which is
    ``KEY_WORDS`` words. A prompt finds entries of its own place and space only. ``key``,
    ``before``, ``start``, ``space`` and ``place`` are arrays that entry ids index. ``removing`` is
    called with the ids of entries before they are removed. Ids are used again.
    """

    def __init__(self, chunk_tokens: int, capacity: int, seed: bytes = b"") -> None:
        self.removing: Callable[[I64Array], None] = lambda ids: None
        self.chunk_tokens, self.capacity = chunk_tokens, max(1, capacity)
        self.count = 0
        self.replaced = 0
        """How many entries were replaced by others."""
        size = self.capacity + 1  # no entry has id 0
        self.key: U64Array = np.zeros((size, KEY_WORDS), np.uint64)
        self.before: U64Array = np.zeros((size, KEY_WORDS), np.uint64)
        self.space: U64Array = np.zeros((size, KEY_WORDS), np.uint64)
        self.start: I64Array = np.zeros(size, np.int64)
        self.place: I64Array = np.zeros(size, np.int64)
        self._tokens: U32Array = np.zeros((size, chunk_tokens), np.uint32)
        self._hash: U64Array = np.zeros(size, np.uint64)
        self._used: I64Array = np.zeros(size, np.int64)
        self._clock = 0
        self._next, self._free, self._hand = 1, list[int](), 0
        buckets = 1 << (self.capacity - 1).bit_length()
        self._table: npt.NDArray[np.int32] = np.zeros((buckets, WAYS), np.int32)
        self._filter: npt.NDArray[np.uint8] = np.zeros(buckets * _CELLS, np.uint8)
        self._shift = np.uint64(65 - (buckets * _CELLS).bit_length())
        self._seed = seed
        self._base = int.from_bytes(hashlib.sha256(seed + b"base").digest()[:8], "little") | 1
        self._powers(chunk_tokens + _BLOCK)

    def keys_of(self, ids: I64Array) -> U64Array:
        """The names of entries: the words of their keys, and their places."""
        return self.named(self.place[ids], self.key[ids])

    @staticmethod
    def named(place: int | I64Array, keys: U64Array) -> U64Array:
        """The names that ``keys_of`` gives entries with ``keys`` in ``place``: ``(n, KEY_WORDS +
        1)``. ``place`` may be an array with a place for each key."""
        names = np.empty((len(keys), KEY_WORDS + 1), np.uint64)
        names[:, :KEY_WORDS], names[:, KEY_WORDS] = keys, place
        return names

    # ------------------------------------------------------------ entries

    def add(self, place: int, space: U64Array, chunks: Chunks) -> I64Array:
        """Add entries, ``capacity`` at most. Returns the ids of those that are kept."""
        hashes = self._hash_chunks(chunks.tokens, self._salt(place, space))
        if len(some := _last_alike(hashes)) < len(hashes):  # adding each would take 20 us
            chunks, hashes = chunks.of(some), hashes[some]
        tokens = chunks.tokens
        count = len(tokens)
        fresh = min(count, self.capacity + 1 - self._next)
        if (short := count - fresh - len(self._free)) > 0:
            self._replace(self._oldest(short))
        recycled = [self._free.pop() for _ in range(count - fresh)]
        ids = np.array([*recycled, *range(self._next, self._next + fresh)], np.int64)
        self._next += fresh
        self.count += count
        self._tokens[ids], self.key[ids] = tokens, chunks.keys
        self.before[ids], self.start[ids] = chunks.before, chunks.starts
        self.space[ids], self.place[ids] = space, place
        self._hash[ids] = hashes
        self.touch(ids)
        cells = self._cells(self._hash[ids])
        np.add.at(self._filter, cells, 1)
        for entry, bucket in zip(ids.tolist(), (cells // _CELLS).tolist(), strict=True):
            ways = self._table[bucket]
            if ways.all():
                self._replace(ways[[self._used[ways].argmin()]].astype(np.int64))
            ways[ways.argmin()] = entry
        there: I64Array = ids[self.place[ids] == place]  # equal ones may have replaced each other
        return there

    def remove(self, ids: I64Array) -> None:
        """Remove entries. ``ids`` are distinct, and will be used again."""
        self.removing(ids)
        cells = self._cells(self._hash[ids])
        np.subtract.at(self._filter, cells, 1)
        buckets = cells // _CELLS
        which, way = (self._table[buckets] == ids[:, None]).nonzero()
        self._table[buckets[which], way] = 0
        self.place[ids] = 0
        self._free += ids.tolist()
        self.count -= len(ids)

    def _replace(self, ids: I64Array) -> None:
        self.replaced += len(ids)
        self.remove(ids)

    def touch(self, ids: I64Array) -> None:
        """Note that the entries ``ids`` were used now."""
        self._clock += 1
        self._used[ids] = self._clock

    def _oldest(self, count: int) -> I64Array:
        """``count`` entries that were used longest ago, among a sample of the next ones."""
        sample = min(self.capacity, _SAMPLE + 4 * count)
        ids = 1 + (self._hand + np.arange(sample)) % self.capacity
        self._hand = (self._hand + sample) % self.capacity
        ids = ids[self.place[ids] != 0]
        if len(ids) < count:
            ids = np.flatnonzero(self.place)
        return ids[np.argsort(self._used[ids], kind="stable")[:count]]

    # ------------------------------------------------------------ finding

    def find(
        self, place: int, space: U64Array, tokens: U32Array, first: int, usable: Usable
    ) -> list[Run]:
        """The runs of known chunks in ``tokens`` from offset ``first`` on. They ascend and are
        disjoint, and each of their tokens was compared. Of chunks that overlap, those of the longer
        run are chosen. ``usable`` says which entries may be found."""
        prompt = tokens[first:]
        hits, hashes = self._hits(prompt, self._salt(place, space))
        for _ in range(_ROUNDS):
            if not len(hits):
                return []
            at = _choose(hits, self.chunk_tokens)
            which, ids = self._verified(place, space, prompt, hits[at], hashes[at], usable)
            found, wrong = hits[at[which]], np.delete(at, which)
            if not len(wrong):
                break
            hits, hashes = np.delete(hits, wrong), np.delete(hashes, wrong)
        self.touch(ids)
        return self._runs(first + found, ids) if len(ids) else []

    def _hits(self, prompt: U32Array, salt: np.uint64) -> tuple[I64Array, U64Array]:
        """The offsets at which the chunk's hash is that of an entry, and these hashes. The prompt
        is searched in blocks that fit a processor's cache, which halves the time."""
        offsets, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
        last = len(prompt) - self.chunk_tokens + 1 if self.count else 0
        for begin in range(0, last, _BLOCK):
            end = min(begin + _BLOCK, last)
            of_block = self._hash_offsets(prompt[begin : end + self.chunk_tokens - 1], salt)
            passed = (self._filter.take(self._cells(of_block)) != 0).nonzero()[0]
            offsets.append(begin + passed)
            hashes.append(of_block[passed])
        maybe, of_maybe = np.concatenate(offsets), np.concatenate(hashes)
        few = _thinned(maybe, self.chunk_tokens)
        maybe, of_maybe = maybe[few], of_maybe[few]
        buckets = self._cells(of_maybe) // _CELLS
        known, left = np.zeros(len(maybe), np.bool_), np.arange(len(maybe))
        for way in range(WAYS):
            alike = self._hash.take(self._table[buckets[left], way]) == of_maybe[left]
            known[left[alike]] = True
            left = left[~alike]
        return maybe[known], of_maybe[known]

    def _verified(
        self,
        place: int,
        space: U64Array,
        prompt: U32Array,
        offsets: I64Array,
        hashes: U64Array,
        usable: Usable,
    ) -> tuple[I64Array, I64Array]:
        """Pairs of an index in ``offsets``, ascending, and an entry whose tokens stand there."""
        ways = self._table[self._cells(hashes) // _CELLS]
        which, way = (self._hash[ways] == hashes[:, None]).nonzero()
        ids = ways[which, way].astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(prompt, self.chunk_tokens)
        right = (windows[offsets[which]] == self._tokens[ids]).all(axis=1)
        right &= (self.space[ids] == space).all(axis=1) & (self.place[ids] == place)
        which, ids = which[right], ids[right]
        right = usable(ids)
        return which[right], ids[right]

    def _runs(self, offsets: I64Array, ids: I64Array) -> list[Run]:
        """The runs of the entries ``ids`` at ``offsets``, which ascend. Several entries may stand
        at one offset. A run goes on while an entry at the next offset was stored right after it."""
        cuts = np.flatnonzero(np.diff(offsets, prepend=-1))
        if len(cuts) == len(ids):
            return self._plain_runs(offsets, ids)
        runs, k = list[Run](), self.chunk_tokens
        ends: dict[tuple[bytes, int], list[int]] = {}
        """The runs that may go on, by the key of the last chunk and the position behind it."""
        at = -1
        keys, before = _each(self.key[ids]), _each(self.before[ids])
        starts = self.start[ids].tolist()
        for begin, end in zip(cuts.tolist(), [*cuts[1:].tolist(), len(ids)], strict=True):
            offset = int(offsets[begin])
            there = range(begin, end)
            longer = {}
            if offset == at + k:
                for i in there:
                    run = ends.get((before[i], starts[i]))
                    if run is not None:
                        longer[keys[i], starts[i] + k] = [*run, int(ids[i])]
            if not longer:
                runs += _one_run(ends, at, k)
                longer = {(keys[i], starts[i] + k): [int(ids[i])] for i in there}
            ends, at = longer, offset
        return runs + _one_run(ends, at, k)

    def _plain_runs(self, offsets: I64Array, ids: I64Array) -> list[Run]:
        """As ``_runs``, but faster, for one entry at each offset."""
        joined = (self.before[ids[1:]] == self.key[ids[:-1]]).all(axis=1)
        joined &= np.diff(offsets) == self.chunk_tokens
        joined &= np.diff(self.start[ids]) == self.chunk_tokens
        cuts = [0, *(np.flatnonzero(~joined) + 1).tolist(), len(ids)]
        return [Run(int(offsets[a]), ids[a:b].tolist()) for a, b in pairwise(cuts)]

    # ------------------------------------------------------------ hashes

    def _powers(self, count: int) -> None:
        """Compute the first ``count`` powers of the base and of its inverse."""
        steps = np.full((2, count), self._base, np.uint64)
        steps[1] = pow(self._base, -1, 1 << 64)
        steps[:, 0] = 1
        self._power, self._inverse = np.cumprod(steps, axis=1, dtype=np.uint64)

    def _salt(self, place: int, space: U64Array) -> np.uint64:
        """A number that makes the hashes of a space differ from those of other spaces."""
        text = place.to_bytes(8, "little", signed=True) + space.tobytes()
        digest = hashlib.blake2b(text, digest_size=8, key=self._seed[:64]).digest()
        return np.uint64(int.from_bytes(digest, "little"))

    def _cells(self, hashes: U64Array) -> I64Array:
        return (hashes >> self._shift).view(np.int64)

    def _hash_chunks(self, tokens: U32Array, salt: np.uint64) -> U64Array:
        powers = self._power[self.chunk_tokens - 1 :: -1]
        sums: U64Array = (_mixed(tokens) * powers).sum(axis=1, dtype=np.uint64)
        return _spread(sums, salt)

    def _hash_offsets(self, prompt: U32Array, salt: np.uint64) -> U64Array:
        """The hash of the chunk at each offset: uint64, ``(len(prompt) - chunk_tokens + 1,)``."""
        size, k = len(prompt), self.chunk_tokens
        sums = np.empty(size + 1, np.uint64)
        sums[0] = 0
        mixed = _mixed(prompt)
        mixed *= self._inverse[:size]
        np.cumsum(mixed, out=sums[1:])
        windows = sums[k:] - sums[:-k]
        windows *= self._power[k - 1 : size]
        return _spread(windows, salt)


def _mixed(tokens: U32Array) -> U64Array:
    """``m`` of each token: mixed bits, so that sums of few tokens differ."""
    mixed = tokens.astype(np.uint64)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _spread(hashes: U64Array, salt: np.uint64) -> U64Array:
    """Mix all bits of the sums into the high bits, which choose the bucket. Changes ``hashes``."""
    hashes ^= salt
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    return hashes


def _thinned(offsets: I64Array, k: int) -> BoolArray | slice:
    """Which of ``offsets``, which ascend, are looked at: only some of ``_DENSE`` or more
    consecutive ones, else all."""
    begins = np.flatnonzero(np.diff(offsets, prepend=-2) != 1)
    sizes = np.diff(begins, append=len(offsets))
    dense = np.flatnonzero(sizes >= _DENSE)
    if not len(dense):
        return slice(None)
    kept = np.ones(len(offsets), np.bool_)
    single = offsets[np.repeat(sizes < _DENSE, sizes)]
    begins, sizes = begins[dense], sizes[dense]
    firsts = offsets[begins]
    beside = single.searchsorted(np.stack([firsts - k, firsts + sizes + k], axis=1)).tolist()
    inside, period = np.arange(sizes.max()) % k, np.arange(k) < _PERIOD
    for begin, size, near in zip(begins.tolist(), sizes.tolist(), beside, strict=True):
        kept[begin : begin + size] = period[inside[:size]]
        kept[begin + size - 1 : max(0, begin - 1) : -k] = True
        for offset in single[slice(*near)].tolist():
            kept[begin + (offset - int(offsets[begin])) % k : begin + size : k] = True
    return kept


def _last_alike(hashes: U64Array) -> I64Array:
    """The indices of the entries that stay. Equal hashes share a bucket, so only the last ``WAYS``
    of them stay; later ones would replace the others."""
    order = hashes.argsort(kind="stable")
    ordered = hashes[order]
    gone = np.zeros(len(hashes), np.bool_)
    gone[:-WAYS] = ordered[:-WAYS] == ordered[WAYS:]
    return np.sort(order[~gone])


def _choose(hits: I64Array, k: int) -> I64Array:
    """The indices of offsets in ``hits``, which ascend, such that no two chunks of ``k`` tokens
    overlap. It goes from left to right. Of the chunks that overlap the first one left, the chunk is
    chosen that begins the longest run of hits that are ``k`` apart."""
    order = np.argsort((hits % k).astype(np.min_scalar_type(k)), kind="stable")
    ends = np.flatnonzero(np.diff(hits[order], append=-1) != k)
    lengths, place = np.empty(len(hits), np.int64), np.empty(len(hits), np.int64)
    place[order] = np.arange(len(hits))
    lengths[order] = np.repeat(ends + 1, np.diff(ends, prepend=-1)) - np.arange(len(hits))
    chosen, at = list[I64Array](), 0
    while at < len(hits):
        overlap = at + 1
        if overlap < len(hits) and hits.item(overlap) < hits.item(at) + k:
            overlap = int(hits.searchsorted(hits.item(at) + k))
            at += int(lengths[at:overlap].argmax())
        run = order[place.item(at) : place.item(at) + lengths.item(at)]
        chosen.append(run)
        last = run.item(-1)
        at = last + 1
        if at < len(hits) and hits.item(at) < hits.item(last) + k:
            at = int(hits.searchsorted(hits.item(last) + k))
    return np.concatenate(chosen)


def _each(keys: U64Array) -> list[bytes]:
    """The bytes of each key."""
    return [*map(bytes, keys.view(f"V{keys.itemsize * keys.shape[1]}").ravel().tolist())]


def _one_run(ends: dict[tuple[bytes, int], list[int]], at: int, k: int) -> list[Run]:
    """The run that ends with the chunk at offset ``at``, if there is one."""
    return [Run(at - k * (len(ids) - 1), ids) for ids in list(ends.values())[-1:]]
