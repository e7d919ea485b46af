"""A disk tier behind a daemon, against a raw file in the same folder.

Law of this file: nothing of the user's is touched. All is in a new folder inside of the one that is
named, which is gone afterwards.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import quote

from kvass.cli.bench.copies import KvCache, PromptShape
from kvass.cli.bench.rig import (
    EngineSessions,
    best_ratio,
    fresh_name,
    say,
    seconds,
    start_daemon,
    wait_for,
)
from kvass.errors import ConfigError, TierDown, Unavailable
from kvass.tiers.base import Buffer
from kvass.tiers.url import TierUrl, parse_tier_url, read_tier_url, redacted
from kvass.types import Size

WARM_UP: Final = 3
"""Rounds after which a disk's places have all been written once, and are written over."""
_SPARE_BYTES: Final = 64 << 20


def disk_url(text: str) -> TierUrl:
    """A disk tier's URL, whose capacity does not matter. Raises ``ConfigError``."""
    url = parse_tier_url(text)
    if url.scheme != "disk":
        raise ConfigError(f"--tier {redacted(text)}: kvass bench measures disks; use disk:FOLDER")
    read_tier_url(spelled("disk", url.where, {"capacity": "1GiB"} | url.options))
    return url


def measure_tier(url: TierUrl, l1_bytes: int, rounds: int, prompt: PromptShape) -> dict[str, Any]:
    """``tier_store_vs_raw`` and its like, by the names in the package's docstring. Raises
    ``KvassError``."""
    capacity, need = 2 * prompt.bytes + _SPARE_BYTES, 3 * prompt.bytes + 2 * _SPARE_BYTES
    with own_folder(Path(url.where), need) as folder, ExitStack() as ending:
        (place := folder / "tier").mkdir()
        options = url.options | {"capacity": str(capacity)}
        tier = ("--tier", spelled("disk", str(place), options), "--keep-loaded", "no")
        threads = int(options.get("threads", "4"))
        raw = RawFile(folder / "raw", prompt.bytes // prompt.chunks, prompt.chunks, threads)
        ending.callback(raw.close)
        say(f"a disk tier, {rounds} rounds of {Size(prompt.bytes).rounded()}")
        first, name = ending.enter_context(ExitStack()), fresh_name()
        mine = Tiered(prompt, _engine(l1_bytes, tier, name, prompt, first), ending)
        there = [*mine.shared.reshape(prompt.chunks, -1)]
        ending.callback(there.clear)
        stores, writes = _in_turns(mine.flush, partial(raw.put, there), rounds)
        first.close()
        mine.engine = _engine(l1_bytes, tier, name, prompt, ending)
        wait_for(mine.found, "the rows that the tier has")
        loads, reads = _in_turns(mine.promote, partial(raw.get, there), rounds)
    part = mine.loaded_bytes / prompt.bytes
    return {
        "bytes_equal": mine.same,
        "direct_io": raw.direct,
        "tier_store_vs_raw": best_ratio(stores, writes),
        "tier_load_vs_raw": best_ratio(loads, [each * part for each in reads]),
        "tier_store_gbps": prompt.bytes / median(stores) / 1e9,
        "raw_write_gbps": prompt.bytes / median(writes) / 1e9,
        "tier_load_gbps": mine.loaded_bytes / median(loads) / 1e9,
        "raw_read_gbps": prompt.bytes / median(reads) / 1e9,
    }


def _engine(
    l1_bytes: int, flags: Sequence[str], name: str, prompt: PromptShape, ending: ExitStack
) -> EngineSessions:
    """An engine of a new daemon on the tier; ``ending`` ends both."""
    socket = ending.enter_context(start_daemon(l1_bytes, *flags)).socket
    tokens = prompt.chunk_tokens
    return EngineSessions(socket, prompt.groups, ending, name=name, chunk_tokens=tokens)


class Tiered(KvCache):
    """The cache of an engine on a daemon with one tier. Each step gives its seconds."""

    same = True
    """Whether all that was loaded was right."""

    def flush(self) -> float:
        """From the commit of a new prompt until the tier has all of it."""
        wanted = self._rows("stored") + self.prompt.chunks * len(self.groups)
        self.renew()
        self.store()
        return seconds(partial(wait_for, lambda: self._rows("stored") >= wanted, "the flush"))

    def promote(self) -> float:
        """From a lookup of the prompt to its match. The daemon drops what it loaded once it is
        released, so each time all comes from the tier. Raises ``Unavailable`` if it did not."""
        before = self._rows("loaded")
        began_s = time.perf_counter()
        matched = self.engine.look_up(self.digests)
        took_s = time.perf_counter() - began_s
        self.fetch(matched)
        self.same &= self.right()
        if (loaded := self._rows("loaded") - before) != self.loaded:
            raise Unavailable(f"loaded {loaded} of {self.loaded} rows: L1 had some")
        return took_s

    def found(self) -> bool:
        """Not at once after a start: a daemon must ask the tier for its epoch first."""
        matched = self.engine.ask(self.digests)
        self.engine.release(matched)
        return matched.chunks == self.prompt.chunks

    def _rows(self, what: str) -> int:
        """How many the tier has stored or loaded. Raises ``TierDown`` if it is in trouble."""
        (tier,) = self.engine.scheduler.status()["tiers"]
        if not tier.get("up", True) or tier.get("store_failures", 0):
            raise TierDown(f"{tier['tier']}: {tier.get('trouble') or 'rows were not stored'}")
        return int(tier.get(f"{what}_rows", 0))


def _in_turns(
    ours: Callable[[], float], theirs: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of both in each round; they take turns to begin."""
    times = list[float](), list[float]()
    steps = ours, partial(seconds, theirs)
    for number in range(rounds + WARM_UP):
        for who in (0, 1)[:: -1 if number % 2 else 1]:
            times[who].append(steps[who]())
    return times[0][WARM_UP:], times[1][WARM_UP:]


def spelled(scheme: str, where: str, options: Mapping[str, str]) -> str:
    """The URL of a tier."""
    values = (f"{name}={quote(value, safe='/:')}" for name, value in options.items())
    return f"{scheme}:{quote(where, safe='/:')}?{'&'.join(values)}"


@contextmanager
def own_folder(parent: Path, need: int) -> Iterator[Path]:
    """A new folder in ``parent``, gone afterwards. Raises ``ConfigError`` without ``need`` bytes of
    room."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=parent) as made:
            if (free := shutil.disk_usage(made).free) < need:
                have, wanted = (f"{size / 2**30:.1f}GiB" for size in (free, need))
                raise ConfigError(f"{parent}: {have} are free, and bench needs {wanted}")
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"{parent}: {error.strerror or error}") from error


class RawFile:
    """A fallocated file of ``count`` records, written and read past the page cache (``direct``:
    whether it can be) by ``threads`` threads."""

    def __init__(self, path: Path, size: int, count: int, threads: int) -> None:
        self._path, self._size = path, size
        self._pool = ThreadPoolExecutor(threads, "bench-raw")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.direct = True
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o600)
        os.posix_fallocate(self._fd, 0, count * size)

    def put(self, data: Sequence[Buffer]) -> None:
        """Write all of it over what is there."""
        self._each(os.pwritev, data)

    def get(self, into: Sequence[Buffer]) -> None:
        """Read it back."""
        self._each(os.preadv, into)

    def close(self) -> None:
        """Close, and remove it."""
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _each(self, move: Callable[[int, Sequence[Any], int], int], data: Sequence[Buffer]) -> None:
        def one(i: int) -> None:
            assert move(self._fd, [data[i].data], i * self._size) == self._size, "a short one"

        list(self._pool.map(one, range(len(data))))
