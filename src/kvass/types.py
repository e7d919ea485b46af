"""Types that all layers share: layouts, slots, limits. Only values and pure functions of them.

Units are in the names: ``*_bytes``, ``*_tokens``, ``*_s`` (seconds).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE: Final = 4096
"""Slots and shards are padded to this many bytes, so that O_DIRECT and DMA need no bounce."""

MAX_RANKS: Final = 128
"""At most this many worker processes in one instance (law 2)."""

MAX_GROUPS: Final = 63
"""At most this many layer groups: a mask of them fits int64."""

SCHEDULER: Final = -1
"""The rank under which an instance's scheduler session is known; workers are 0..ranks-1."""

GroupKind = Literal["full", "sliding_window", "chunked_local", "state"]

if TYPE_CHECKING:
    U64Array = npt.NDArray[np.uint64]
    U32Array = npt.NDArray[np.uint32]
    I64Array = npt.NDArray[np.int64]
    Tokens = TypeVar("Tokens", int, I64Array)
    """A number of tokens, or many of them."""


def __getattr__(name: str) -> Any:
    """The types of arrays. numpy takes 7 MiB and 50 ms: who needs no array does not import it."""
    if name not in ("U64Array", "U32Array", "I64Array", "Tokens"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np
    import numpy.typing as npt

    if name == "Tokens":
        return TypeVar("Tokens", int, npt.NDArray[np.int64])
    kinds: Any = {"U64Array": np.uint64, "U32Array": np.uint32, "I64Array": np.int64}
    return npt.NDArray[kinds[name]]


# What a field of a message may hold. Decoding refuses all else (``wire/framing.py``), so the
# arithmetic behind it cannot overflow: tokens of the longest prompt (65,536 keys of 2**31 tokens)
# and bytes of the largest row fit int64. Whether a value makes sense is for the core to check.

Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
PageBytes = Annotated[int, Meta(ge=0, le=1 << 40)]
MOST_SECONDS: Final = 1e12
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
"""Also milliseconds, and tokens per second: finite, and not negative."""
Name = Annotated[str, Meta(max_length=4096)]
"""At most so many characters. The daemon's ``Limits`` allow fewer of some."""
Text = Annotated[str, Meta(max_length=65_536)]
ShortBytes = Annotated[bytes, Meta(max_length=256)]
Digests = Annotated[bytes, Meta(max_length=4 << 20)]
GroupDigests = Annotated[tuple[Digests, ...], Meta(max_length=MAX_GROUPS)]
Names = Annotated[tuple[Name, ...], Meta(max_length=4096)]
Ranks = Annotated[tuple[Int32, ...], Meta(max_length=4096)]
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


class Size(int):
    """A number of bytes, written ``8GiB``, ``8Gi``, ``512 mib``, ``1.5GB``, ``2G`` or as a plain
    number.

    ``G`` is a power of 1000 and ``Gi`` a power of 1024.
    """

    @classmethod
    def parse(cls, text: object) -> Size:
        """Raises ``ValueError`` for anything else."""
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
        """For people, like ``1.86GiB``."""
        fit = [unit for unit in _BINARY.items() if unit[1] <= self]
        unit, factor = fit[-1] if fit else ("B", 1)
        return f"{round(self / factor, 2):g}{unit}"


class GroupLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """One layer group as one rank holds it: layers sharing a block-id space and a cache spec.

    ``page_bytes[i]`` is what one block takes in layer ``layers[i]`` (or several layers, joined).
    ``window_tokens``: of a ``sliding_window`` the tokens that one token attends to, itself included
    (and what the engine keeps beyond); of ``chunked_local`` the size of a local chunk; else 0. A
    ``state`` is a running summary, kept in the block that ends at its token.
    """

    kind: GroupKind
    block_tokens: Int32
    layers: Annotated[tuple[Text, ...], Meta(max_length=4096)]
    page_bytes: Annotated[tuple[PageBytes, ...], Meta(max_length=4096)]
    window_tokens: Int32 = 0

    def needs(self, tokens: Tokens) -> Tokens:
        """The first token whose pages a hit of ``tokens`` needs: all of [that, ``tokens``).

        The next token of a sliding window sees ``window_tokens - 1`` others; a state at ``tokens``
        needs the one block that ends there.
        """
        if self.kind == "full":
            return tokens * 0
        if self.kind == "chunked_local":
            return tokens - tokens % self.window_tokens
        reach = 1 if self.kind == "state" else self.window_tokens - 1
        first = tokens - reach
        return first * (first > 0)

    def blocks(self, first_token: int, end_token: int) -> range:
        """The blocks of a request that hold tokens ``[first_token, end_token)``, also in part."""
        return range(first_token // self.block_tokens, -(-end_token // self.block_tokens))

    def row_blocks(self, chunk_tokens: int) -> int:
        """Blocks at the end of a chunk that its row keeps: those some hit may need. A hit ends at a
        chunk's end. ``chunk_tokens`` is a multiple of ``block_tokens``."""
        reach = chunk_tokens
        if self.kind == "sliding_window":
            reach = min(chunk_tokens, self.window_tokens - 1)
        elif self.kind == "chunked_local" and chunk_tokens % self.window_tokens == 0:
            reach = 0
        elif self.kind == "state":
            reach = 1
        return len(self.blocks(chunk_tokens - reach, chunk_tokens))

    def shard_bytes(self, chunk_tokens: int) -> int:
        """Bytes of this rank's part of one row, padded to ``PAGE``; at least one ``PAGE``."""
        return align_up(max(1, self.row_blocks(chunk_tokens) * sum(self.page_bytes)))


MAX_BLOCKS: Final = 254
"""Of a chunk whose blocks are known: the core counts them in a byte."""


def chunk_blocks(groups: Sequence[GroupLayout], chunk_tokens: int) -> int:
    """Blocks of a chunk, if hits may end at each of them; 0: they end with a chunk."""
    blocks = chunk_tokens // groups[0].block_tokens
    alike = {(g.kind, g.block_tokens) for g in groups} == {("full", groups[0].block_tokens)}
    return blocks if alike and 1 < blocks <= MAX_BLOCKS else 0


class RankLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The layout of one rank's bytes: its layer groups, in group-id order."""

    groups: Annotated[tuple[GroupLayout, ...], Meta(max_length=256)]


class Slots(msgspec.Struct, frozen=True, omit_defaults=True):
    """The slots of a list of rows in the arena, for all shards.

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
"""The cap of a tenant that may have all."""
MOST_QUOTAS: Final = 64
"""So many tenants may have one."""
DEFAULT_TENANT: Final = "default"
"""Pays for what tenants without a quota store."""
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_tenant_name(name: str) -> bool:
    """Whether ``name`` is a valid name of a tenant."""
    return _TENANT.fullmatch(name) is not None


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant's share of L1 or of a tier: its cap and its reservation.

    ``cap_bytes`` is ``NO_CAP`` if there is no cap.
    """

    tenant: Name
    cap_bytes: Int64 = NO_CAP
    reserved_bytes: Int64 = 0

    @classmethod
    def parse(cls, text: str) -> Quota:
        """``NAME=CAP``, ``NAME=CAP:RESERVED`` or ``NAME=:RESERVED``, in sizes as of ``Size``.
        Raises ``ValueError``."""
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
        """Why no tenant can have this quota, in one line; empty if it is valid."""
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
    """Raise ``ValueError`` unless ``what``, which has ``size`` bytes, has room for all quotas."""
    names = [quota.tenant for quota in quotas]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} has two: give one")
    if (reserved := Size(sum(quota.reserved_bytes for quota in quotas))) > size:
        raise ValueError(f"{reserved} are reserved of {what} of {Size(size)}")
    if len(quotas) > MOST_QUOTAS:
        raise ValueError(f"{len(quotas)} tenants, there may be {MOST_QUOTAS}")


DEVICE_S: Final = 1.0
"""How long slots rest after the process that was writing them has ended. The kernel releases its
files, a GPU's among them, a moment later if another process reads ``/proc/PID/smaps`` or the
machine goes to sleep."""


class Limits(msgspec.Struct, frozen=True):
    """Bounds on the requests of one client (law 12).

    The daemon sends all of them in the handshake, also those that have their default value, because
    the defaults of another version may differ.
    """

    frame_bytes: int = 4 << 20
    """Largest frame either side accepts after the handshake."""
    keys_per_message: int = 32_768
    """To find more takes one step of the daemon too long (10 ms). Of a prompt with several layer
    groups so many rows are looked for, so fewer chunks: what comes after them is a miss, and it is
    not stored."""
    leases_per_instance: int = 16_384
    reservations_per_instance: int = 16_384
    sessions: int = 1024
    sessions_per_uid: int = 512
    """Of one user, so that no user alone takes all: 56 engines of TP 8, each of 9 sessions."""
    waiting_bytes: int = 64 << 20
    """What lookups that wait for tiers take of the daemon's memory, a quarter of it for one
    instance. A lookup of 32,768 chunks takes 1.3 MiB and more; one of 1,000 takes 42 KiB."""
    namespaces: int = 1024
    segment_tokens: int = 131_072
    """Tokens of one ``IndexChunks`` or ``FindSegments``: to search more takes one step too long."""
    segment_chunks: int = 512
    """Chunks of one ``IndexChunks``: 3 ms of work."""
    segment_index_bytes: int = 256 << 20
    """Memory for indexed chunks (200,000 of 256 tokens), taken as it is used; for each of up to
    four sizes of chunks. In a full index a new chunk replaces one that was not found for long."""
    instance_write_share: float = 0.25
    """reserved + quarantined bytes of one instance, as a share of L1."""
    request_id_bytes: int = 512
    identity_bytes: int = 64 << 10
    identity_fields: int = 512
    """vLLM's engines have some 50."""
    layers: int = 4096
    """Of one rank, in all groups; what lies apart in memory counts (80 layers of 8 heads: 640)."""
    register_bytes: int = 640 << 10
    """A larger ``Register`` is not decoded: it could take 25 ms. 4,096 layers take 350 KiB."""


GUESS_TOKENS_S: Final = 5_000.0
"""What an engine that has measured nothing yet is taken to compute per second."""
MAX_PATIENCE_S: Final = 30.0
"""No request waits longer for tiers and stores, however long its prompt."""


class Timing(msgspec.Struct, frozen=True):
    """Time limits of the daemon. It sends them in the handshake, so only the daemon is
    configured."""

    lease_s: float = 60.0
    reserve_s: float = 60.0
    dma_grace_s: float = 30.0
    """How long after its EOF a writer's device may still write to the arena (law 3), if the daemon
    cannot see the end of its process, or if it lives on. (EOF may come 26 s before the GPU's
    descriptors are released: sgl-project/sglang#32829.) Only the slots that it was writing wait."""
    lookup_budget_ms: float = 100.0
    hello_s: float = 5.0
    """How long a session may take to say Hello."""

    def patience_s(self, tokens: int, tokens_s: float) -> float:
        """How long an engine waits for ``tokens`` tokens at most: as long as it would compute them
        at ``tokens_s`` per second (0: not known), but no less than ``lookup_budget_ms``."""
        compute_s = tokens / (tokens_s or GUESS_TOKENS_S)
        return max(self.lookup_budget_ms / 1000, min(compute_s, MAX_PATIENCE_S))
