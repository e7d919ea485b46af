"""Types that every layer shares: layouts, slots, limits. There are only values and pure functions.

Units are in the names: ``*_bytes``, ``*_tokens``, ``*_s`` (seconds).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvass.kinds import KINDS, GroupKind, Kind, Tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE: Final = 4096
"""Slots and shards are padded to this many bytes, so that O_DIRECT and DMA need no bounce
buffer."""

MAX_RANKS: Final = 128
"""The largest number of worker processes of one instance (law 2)."""

MAX_GROUPS: Final = 63
"""The largest number of layer groups: a bit mask of them fits int64."""

KEY_WORDS: Final = 4
"""A key is a digest of up to 32 bytes, kept as this many uint64."""

SCHEDULER: Final = -1
"""The rank under which an instance's scheduler connection is known; workers are 0..ranks-1."""

if TYPE_CHECKING:
    U64Array = npt.NDArray[np.uint64]
    U32Array = npt.NDArray[np.uint32]
    I64Array = npt.NDArray[np.int64]


def __getattr__(name: str) -> Any:
    """The array types, made at first use. Importing numpy takes 7 MiB and 50 ms, so a process that
    uses no array does not import it."""
    if name not in ("U64Array", "U32Array", "I64Array"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np
    import numpy.typing as npt

    kinds: Any = {"U64Array": np.uint64, "U32Array": np.uint32, "I64Array": np.int64}
    return npt.NDArray[kinds[name]]


# The values that a field of a message may have. Decoding refuses all others (``wire/framing.py``),
# so later arithmetic cannot overflow: tokens of the longest prompt (65,536 keys of 2**31 tokens)
# and bytes of the largest row fit int64. The core checks whether a value makes sense.

Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An identity, such as that of a lease. It is compared, and never added up."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""How many tokens, bytes or rows a client counted. All such numbers of all connections can be
added up in 64 bits."""
MemoryBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
PageBytes = Annotated[int, Meta(ge=0, le=1 << 40)]
MOST_SECONDS: Final = 1e12
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
"""A finite number that is not negative; also used for milliseconds and for tokens per second."""
Name = Annotated[str, Meta(max_length=4096)]
"""A string of limited length. The daemon's ``Limits`` are stricter for some of them."""
Text = Annotated[str, Meta(max_length=65_536)]
ShortBytes = Annotated[bytes, Meta(max_length=256)]
Digests = Annotated[bytes, Meta(max_length=4 << 20)]
GroupDigests = Annotated[tuple[Digests, ...], Meta(max_length=MAX_GROUPS)]
Names = Annotated[tuple[Name, ...], Meta(max_length=4096)]
Ranks = Annotated[tuple[Int32, ...], Meta(max_length=4096)]
SessionTag = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Many64 = Annotated[tuple[Int64, ...], Meta(max_length=4096)]


def align_up(value: int, to: int = PAGE) -> int:
    """The smallest multiple of ``to`` that is >= ``value``."""
    return -(-value // to) * to


_BINARY: Final = {f"{prefix}iB": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGT")}
_DECIMAL: Final = {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("kMGT")}
_UNITS: Final = {"": 1, "b": 1} | {
    spelling: factor
    for unit, factor in (_BINARY | _DECIMAL).items()
    for spelling in (unit.lower(), unit.lower().removesuffix("b"))
}


L1_OF_CACHES: Final = 2
"""L1 should have this many times the size of the engines' own KV caches together. L1 and they hold
what was used last, so an L1 of their size has nothing that they have not: it never hits."""


class Size(int):
    """A number of bytes, written ``8GiB``, ``8Gi``, ``512 mib``, ``1.5GB``, ``2G`` or as a plain
    number. ``G`` is a power of 1000, and ``Gi`` is a power of 1024."""

    @classmethod
    def parse(cls, text: object) -> Size:
        """The size that ``text`` stands for. Raises ``ValueError`` if it is not a size."""
        match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", str(text).strip())
        if isinstance(text, bool) or match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"no size: {text!r}; write it like 8GiB or 512MiB")
        number = float(match[1]) if "." in match[1] else int(match[1])
        return cls(number * _UNITS[match[2].lower()])

    def __str__(self) -> str:
        units = [unit for unit in (_BINARY | _DECIMAL).items() if self and self % unit[1] == 0]
        texts = [f"{self // factor}{unit}" for unit, factor in units]
        return min([*texts, str(int(self))], key=len)

    def rounded(self) -> str:
        """A short text for people to read, like ``1.86GiB``."""
        fit = [unit for unit in _BINARY.items() if unit[1] <= self]
        unit, factor = fit[-1] if fit else ("B", 1)
        return f"{round(self / factor, 2):g}{unit}"


def small_l1(l1_bytes: int, cache_bytes: int) -> str:
    """The advice if L1 is too small beside the engines' own KV caches, which have ``cache_bytes``
    together; empty if it is not."""
    least = L1_OF_CACHES * cache_bytes
    if least <= l1_bytes:
        return ""
    return (
        f"L1 of {Size(l1_bytes).rounded()} is less than twice the engines' own KV caches together "
        f"({Size(cache_bytes).rounded()}): it holds little that they do not hold too, so it hits "
        f"seldom; give --l1-size {Size(least).rounded()} or more, or a tier (docs/sizing.md)"
    )


class GroupLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """One layer group as one rank holds it: layers sharing a block-id space and a cache spec.

    ``page_bytes[i]`` is the size of one block in layer ``layers[i]``, which may be several layers
    that were joined. ``window_tokens`` depends on the kind. For ``sliding_window`` it counts the
    tokens that one token attends to, itself included, and those that the engine keeps beyond. For
    ``chunked_local`` it is the size of a local chunk; otherwise it is 0.
    """

    kind: GroupKind
    block_tokens: Int32
    layers: Annotated[tuple[Text, ...], Meta(max_length=4096)]
    page_bytes: Annotated[tuple[PageBytes, ...], Meta(max_length=4096)]
    window_tokens: Int32 = 0

    @property
    def rules(self) -> Kind:
        """What the kind of this group decides."""
        return KINDS[self.kind]

    def needs(self, tokens: Tokens) -> Tokens:
        """The first token whose pages a hit of ``tokens`` tokens needs."""
        return self.rules.needs(tokens, self.window_tokens)

    def blocks(self, first_token: int, end_token: int) -> range:
        """The blocks of a request that hold any of the tokens ``[first_token, end_token)``."""
        return range(first_token // self.block_tokens, -(-end_token // self.block_tokens))

    def row_blocks(self, chunk_tokens: int) -> int:
        """The number of blocks at the end of a chunk that its row keeps: those that a hit
        ending there may need. ``chunk_tokens`` is a multiple of ``block_tokens``."""
        kept = self.rules.kept(chunk_tokens, self.window_tokens)
        return len(self.blocks(chunk_tokens - kept, chunk_tokens))

    def shard_bytes(self, chunk_tokens: int) -> int:
        """Bytes of this rank's part of one row, padded to ``PAGE``; at least one ``PAGE``."""
        return align_up(max(1, self.row_blocks(chunk_tokens) * sum(self.page_bytes)))


MAX_BLOCKS: Final = 254
"""The largest number of blocks of a chunk inside which hits may end: the core counts them in a
byte."""


def chunk_blocks(groups: Sequence[GroupLayout], chunk_tokens: int) -> int:
    """The number of blocks of a chunk if a hit may end at each of them, 0 if hits end with a
    chunk."""
    blocks = chunk_tokens // groups[0].block_tokens
    alike = {(g.rules.whole, g.block_tokens) for g in groups} == {(True, groups[0].block_tokens)}
    return blocks if alike and 1 < blocks <= MAX_BLOCKS else 0


class RankLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layout of one rank's KV bytes: its layer groups, in the order of their ids."""

    groups: Annotated[tuple[GroupLayout, ...], Meta(max_length=256)]


class Slots(msgspec.Struct, frozen=True, omit_defaults=True):
    """The places of a list of rows in the arena, for every shard at once.

    ``extents[s]`` are the byte offsets in the arena at which extent set number ``s`` of this list
    begins, one per shard. Row ``i`` is slot ``slot[i]`` (uint32, little endian) of the set
    ``extents[set_[i]]`` (uint16): shard ``r`` of it lies at ``extents[set_[i]][r] + slot[i] *
    shard_bytes[r]``.
    """

    extents: tuple[tuple[int, ...], ...] = ()
    set_: bytes = b""
    slot: bytes = b""

    def __len__(self) -> int:
        return len(self.slot) // 4

    def first(self, rows: int) -> Slots:
        """The first ``rows`` rows; all, if there are fewer."""
        if rows >= len(self):
            return self
        return Slots(self.extents, self.set_[: 2 * rows], self.slot[: 4 * rows])

    def last(self, rows: int) -> Slots:
        begin = len(self) - rows
        return Slots(self.extents, self.set_[2 * begin :], self.slot[4 * begin :])

    def offsets(self, shard: int, shard_bytes: int) -> I64Array:
        """Byte offset in the arena of ``shard`` of each row: int64, shape ``(len(self),)``."""
        import numpy as np

        if not self.slot:
            return np.empty(0, np.int64)
        bases = np.array([e[shard] for e in self.extents], np.int64)
        sets = np.frombuffer(self.set_, "<u2")
        slots = np.frombuffer(self.slot, "<u4").astype(np.int64)
        found: I64Array = bases[sets] + slots * shard_bytes
        return found


NO_CAP: Final = 1 << 62
"""The cap of a tenant that may use everything."""
MOST_QUOTAS: Final = 64
"""The largest number of tenants with a quota."""
DEFAULT_TENANT: Final = "default"
"""The tenant that pays for the rows of all tenants without a quota."""
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def session_tag(
    name: str, tenant: str = "", kind: Literal["session", "request"] = "session"
) -> int:
    """The tag of a client's session: 1 to 2**32 - 1. Sessions of two tenants differ. A request
    without a session has one of its own, by its id."""
    text = f"{tenant or DEFAULT_TENANT}\0{kind}\0{name}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") or 1


SHORT_NAME: Final = 256
"""The most characters of a ``short_name``."""
_DIGEST: Final = 32
"""The characters of the digest in a ``short_name``."""


def short_name(name: str) -> str:
    """The name of a request in messages, spans and logs. It is ``name`` itself, or, if that is
    long or not printable, its beginning (``short_of``), ``~`` and a digest. Different names have
    different short names. Clients of an engine choose ``name``: it may be no valid Unicode.
    """
    if 0 < len(name) <= SHORT_NAME and name.isprintable() and short_of(name) is None:
        return name
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=_DIGEST // 2)
    return f"{printable(name[: SHORT_NAME - _DIGEST - 1])}~{digest.hexdigest()}"


def short_of(name: str) -> str | None:
    """The beginning of the name of which ``name`` is the short one; None: it is its own."""
    return name[: -_DIGEST - 1] if name[-_DIGEST - 1 : -_DIGEST] == "~" else None


def printable(text: str) -> str:
    """``text`` with ``?`` for all that is not printable."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def is_tenant_name(name: str) -> bool:
    return _TENANT.fullmatch(name) is not None


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """How much of L1 or of a tier a tenant may use, and how much is reserved for it. With a
    ``cap_bytes`` of ``NO_CAP`` it may use everything."""

    tenant: Name
    cap_bytes: Int64 = NO_CAP
    reserved_bytes: Int64 = 0

    @classmethod
    def parse(cls, text: str) -> Quota:
        """Parse ``NAME=CAP``, ``NAME=CAP:RESERVED`` or ``NAME=:RESERVED``. The sizes are
        written as ``Size`` says. Raises ``ValueError``."""
        name, equals, sizes = text.partition("=")
        cap, _, reserved = sizes.partition(":")
        if not equals or not sizes.strip():
            raise ValueError(f"no quota: {text!r}; write NAME=CAP:RESERVED, like team-a=8GiB:2GiB")
        quota = cls(
            name.strip(),
            int(Size.parse(cap)) if cap.strip() else NO_CAP,
            int(Size.parse(reserved)) if reserved.strip() else 0,
        )
        if wrong := quota.wrong():
            raise ValueError(wrong)
        return quota

    def __str__(self) -> str:
        cap = "" if self.cap_bytes == NO_CAP else Size(self.cap_bytes)
        return f"{self.tenant}={cap}:{Size(self.reserved_bytes)}"

    def wrong(self) -> str:
        """One line that says why this quota is not valid; empty if it is valid."""
        cap, reserved = Size(self.cap_bytes), Size(self.reserved_bytes)
        if not is_tenant_name(self.tenant) or self.tenant == "other":
            name = repr(self.tenant[:64])
            return f"tenant {name}: use 1 to 64 letters, digits, '.', '_', '-'; not 'other'"
        if cap < 1 or reserved < 0:
            return f"quota of {self.tenant}: the cap is positive, what is reserved not negative"
        if cap > NO_CAP:
            return f"quota of {self.tenant}: the cap is at most {Size(NO_CAP)}"
        if cap < reserved:
            return f"quota of {self.tenant}: the cap {cap} is below what is reserved, {reserved}"
        return ""


def check_quotas_of(quotas: Sequence[Quota], what: str, size: int) -> None:
    """Raise ``ValueError`` if a tenant has two quotas, if there are too many, or if more than the
    ``size`` bytes of ``what`` are reserved."""
    names = [quota.tenant for quota in quotas]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} has two: give one")
    if (reserved := Size(sum(quota.reserved_bytes for quota in quotas))) > size:
        raise ValueError(f"{reserved} are reserved of {what} of {Size(size)}")
    if len(quotas) > MOST_QUOTAS:
        raise ValueError(f"{len(quotas)} tenants, there may be {MOST_QUOTAS}")


DEVICE_S: Final = 1.0
"""How long slots stay unused after the process that was writing to them has ended. The kernel may
release that process's files, a GPU's among them, a moment after its end. This happens if another
process reads ``/proc/PID/smaps`` or the machine goes to sleep."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of what clients may ask for (law 12). The daemon sends all of them in the
    handshake, even defaults, because those of the next version may differ.
    """

    frame_bytes: int = 4 << 20
    """Largest frame either side accepts after the handshake."""
    keys_per_message: int = 32_768
    """Finding more keys would make one step of the daemon too long (10 ms). A chunk has a row in
    each layer group, and each row counts. So the limit in chunks is lower with several groups. The
    chunks beyond it are a miss and are not stored."""
    leases_per_instance: int = 16_384
    reservations_per_instance: int = 16_384
    sessions: int = 1024
    sessions_per_uid: int = 512
    """Sessions of one user, so that no user takes all of them. It is enough for 56 engines of
    TP 8, which have 9 sessions each."""
    waiting_bytes: int = 64 << 20
    """The daemon's memory for lookups that wait for tiers; one instance may use a quarter of it. A
    lookup of 32,768 chunks takes at least 1.3 MiB; one of 1,000 takes 42 KiB."""
    namespaces: int = 1024
    segment_tokens: int = 131_072
    """Tokens of one ``IndexChunks`` or ``FindSegments``: searching more makes one step too long."""
    segment_chunks: int = 512
    """Chunks of one ``IndexChunks``: 3 ms of work."""
    segment_index_bytes: int = 256 << 20
    """Memory of one index, allocated as it is used: 200,000 chunks of 256 tokens fit. There is an
    index for each of up to four chunk sizes. In a full index a new chunk replaces one that was not
    found for long."""
    instance_write_share: float = 0.25
    """The largest sum of one instance's reserved and quarantined bytes, as a share of L1."""
    request_id_bytes: int = 512
    identity_bytes: int = 64 << 10
    identity_fields: int = 512
    """The identity of a vLLM engine has about 50."""
    layers: int = 4096
    """Layers of one rank in all groups. Parts of a layer that lie apart in memory count as layers:
    80 layers of 8 heads are 640."""
    register_bytes: int = 640 << 10
    """A larger ``Register`` is not decoded: it could take 25 ms. 4,096 layers take 350 KiB."""


GUESS_TOKENS_S: Final = 5_000.0
"""The assumed prefill speed, in tokens per second, of an engine that has measured none yet."""
MAX_PATIENCE_S: Final = 30.0
"""The longest time that a request waits for tiers and stores, however long its prompt is."""


MOST_S: Final = 86_400.0
"""The longest time limit that the daemon can be given."""


class Timing(msgspec.Struct, frozen=True):
    """The daemon's time limits. It sends them in the handshake, so engines need no options."""

    lease_s: float = 60.0
    """At most ``MOST_S``."""
    reserve_s: float = 60.0
    lost_engine_grace_s: float = msgspec.field(default=30.0, name="dma_grace_s")
    """How long a writer's device may still write to the arena after its connection's EOF (law 3).
    It applies if the writer's process lives on, or if the daemon cannot see its end. (EOF may come
    26 s before the GPU's descriptors are released: sgl-project/sglang#32829.) Only the slots that
    the writer was writing wait for it."""
    lookup_budget_ms: float = 100.0
    hello_s: float = 5.0
    """How long a connection may take to say Hello."""

    def patience_s(self, tokens: int, tokens_s: float) -> float:
        """The longest time that an engine waits for the KV of ``tokens`` tokens: the time that
        computing them takes at ``tokens_s`` per second (0: not known), up to ``MAX_PATIENCE_S``. It
        is never less than ``lookup_budget_ms``."""
        compute_s = tokens / (tokens_s or GUESS_TOKENS_S)
        return max(self.lookup_budget_ms / 1000, min(compute_s, MAX_PATIENCE_S))
