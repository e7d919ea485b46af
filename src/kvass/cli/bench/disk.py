"""Measures a disk tier of a daemon, compared with a raw file in the same folder.

Law of this file: no file of the user is touched. All files are in a new folder inside the user's
folder. The new folder is removed afterwards.
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

from kvass.cli.bench.coding import measure_coding
from kvass.cli.bench.copies import KvCache, PromptShape
from kvass.cli.bench.rig import (
    EngineConnections,
    best_ratio,
    fresh_name,
    say,
    seconds,
    start_daemon,
    wait_for,
)
from kvass.errors import ConfigError, TierDown, Unavailable
from kvass.tiers.base import Buffer
from kvass.tiers.url import TierUrl, parse_tier_url, read_tier_url, shown
from kvass.types import Size

WARM_UP: Final = 3
"""Rounds after which all places of the tier have been written once, and are overwritten."""
_SPARE_BYTES: Final = 64 << 20


def disk_url(text: str) -> TierUrl:
    """A disk tier's URL, whose capacity does not matter. Raises ``ConfigError``."""
    url = parse_tier_url(text)
    if url.scheme != "disk":
        raise ConfigError(
            f"--tier {shown(text, False)}: kvass bench measures disks; use disk:FOLDER"
        )
    read_tier_url(spelled("disk", url.where, {"capacity": "1GiB"} | url.options))
    return url


def measure_tier(url: TierUrl, l1_bytes: int, rounds: int, prompt: PromptShape) -> dict[str, Any]:
    """The figures of a tier; the package's docstring explains the names. Raises ``KvassError``."""
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
        **measure_coding(),
    }


def _engine(
    l1_bytes: int, flags: Sequence[str], name: str, prompt: PromptShape, ending: ExitStack
) -> EngineConnections:
    """An engine of a new daemon on the tier; ``ending`` ends both."""
    socket = ending.enter_context(start_daemon(l1_bytes, *flags)).socket
    tokens = prompt.chunk_tokens
    return EngineConnections(socket, prompt.groups, ending, name=name, chunk_tokens=tokens)


class Tiered(KvCache):
    """The KV cache of an engine of a daemon with one tier. Each step returns its seconds."""

    same = True
    """Whether all loaded pages were right."""

    def flush(self) -> float:
        """The time from the commit of a new prompt until the tier has all of it."""
        wanted = self._rows("stored") + self.prompt.chunks * len(self.groups)
        self.renew()
        self.store()
        return seconds(partial(wait_for, lambda: self._rows("stored") >= wanted, "the flush"))

    def promote(self) -> float:
        """The time from a lookup of the prompt to its match. The daemon drops loaded rows when they
        are released, so all rows come from the tier. Raises ``Unavailable`` if they did not."""
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
        """Whether a lookup finds the whole prompt. False right after a
        start of the daemon, because it has to read the epoch from the tier first."""
        matched = self.engine.ask(self.digests)
        self.engine.release(matched)
        return matched.chunks == self.prompt.chunks

    def _rows(self, what: str) -> int:
        """How many rows the tier has stored or loaded. Raises ``TierDown`` if the tier fails."""
        (tier,) = self.engine.scheduler.status()["tiers"]
        if not tier.get("up", True) or tier.get("store_failures", 0):
            raise TierDown(f"{tier['tier']}: {tier.get('trouble') or 'rows were not stored'}")
        return int(tier.get(f"{what}_rows", 0))


def _in_turns(
    ours: Callable[[], float], theirs: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """The seconds of both steps in each round. They take turns to be the first."""
    times = list[float](), list[float]()
    steps = ours, partial(seconds, theirs)
    for number in range(rounds + WARM_UP):
        for who in (0, 1)[:: -1 if number % 2 else 1]:
            times[who].append(steps[who]())
    return times[0][WARM_UP:], times[1][WARM_UP:]


def spelled(scheme: str, where: str, options: Mapping[str, str]) -> str:
    """The parts of a tier's URL as text."""
    values = (f"{name}={quote(value, safe='/:')}" for name, value in options.items())
    return f"{scheme}:{quote(where, safe='/:')}?{'&'.join(values)}"


@contextmanager
def own_folder(parent: Path, need: int) -> Iterator[Path]:
    """A new folder in ``parent``, removed afterwards. Raises ``ConfigError`` if fewer than ``need``
    bytes are free."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvass-bench-", dir=parent) as made:
            if (free := shutil.disk_usage(made).free) < need:
                have, wanted = (f"{size / 2**30:.1f}GiB" for size in (free, need))
                raise ConfigError(f"{parent}: {have} are free, and bench needs {wanted}")
            yield Path(made)
    except OSError as error:
        raise ConfigError(f"{parent}: {error.strerror or error}") from error


class RawFile:
    """A fallocated file of ``count`` records that ``threads`` threads write and read. ``direct``:
    whether this bypasses the page cache."""

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
        """Overwrite the whole file."""
        self._each(os.pwritev, data)

    def get(self, into: Sequence[Buffer]) -> None:
        """Read the whole file."""
        self._each(os.preadv, into)

    def close(self) -> None:
        """Close the file, and remove it."""
        self._pool.shutdown()
        os.close(self._fd)
        self._path.unlink()

    def _each(self, move: Callable[[int, Sequence[Any], int], int], data: Sequence[Buffer]) -> None:
        def one(i: int) -> None:
            assert move(self._fd, [data[i].data], i * self._size) == self._size, "a short one"

        list(self._pool.map(one, range(len(data))))
