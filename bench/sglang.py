"""``python -m bench --sglang``: what a user of SGLang waits for when a prompt is found.

Real SGLang servers on this machine's CPU, one thread each, with saved random weights; bfloat16,
pages of 64 tokens, host pools of layout ``page_first_direct``. ``make test-sglang`` installs
SGLang. ``none`` has no storage backend, ``file`` has SGLang's own of that name, whose files are in
the page cache, ``kvass`` has kvass. One request at a time, the servers in turn; the others are
suspended meanwhile, because an idle scheduler of SGLang keeps a core busy.

SGLang's attention for a CPU computes the found tokens' part of the attention again. The model has
large MLPs, which it does not compute again.

What the names mean. Times are of requests for one token; a ratio is the median over rounds.

- ``cold_s``: a new prompt of 2,011 tokens, by ``none``. ``local_s``: found in ``none``'s own cache.
- ``file_s``, ``kvass_s``: found by the storage backend, after the server's own cache was flushed.
- ``kvass_vs_file``, ``kvass_vs_cold``: how many times faster kvass is.
- ``new_kvass_vs_none`` and so on: new prompts; below 1 it is slower, by looking up and storing.
- ``shared``: whether a second server found what the first one stored (``kvass``), and computed the
  same token.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from kvass._version import TESTED_SGLANG, __version__
from kvass.cli.bench.rig import ratio, say, start_daemon
from kvass.connectors.sglang.plugin import backend_config
from kvass.errors import ConfigError, Unavailable
from tests.support.sglang.server import Answer, Server, overlays
from tests.support.vllm.models import Shape, build

MODELS: Final = Path(__file__).parent.parent / ".cache" / "models"
SHAPE: Final = Shape(intermediate=8192)
PROMPT: Final = 2011
NEW: Final = 811
PAGE: Final = 64
FOUND: Final = (PROMPT - 1) // PAGE * PAGE
COLD: Final = 2
"""In so many rounds the prompt is computed as well."""
SHORT: Final = list(range(4, 36))
"""A prompt that wakes a server up."""
STORED_S: Final = 60.0
MODES: Final = ("none", "file", "kvass")
CACHED: Final = ("file", "kvass")
Servers = Mapping[str, Server]


def words(tokens: int, seed: object) -> list[int]:
    """A random prompt."""
    rng = random.Random(repr(seed))
    return [rng.randrange(4, SHAPE.vocab) for _ in range(tokens)]


def measure_sglang(l1_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures, by the names in this module's docstring. Raises ``KvassError``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all servers are ended
    version = max(TESTED_SGLANG)
    os.environ.setdefault("SGLANG_OVERLAYS", str(Path(sys.prefix) / "overlays"))
    folder_of = overlays()
    if folder_of is None or not (folder_of / f"sglang-{version}").exists():
        raise ConfigError("--sglang: SGLang is not installed: run make test-sglang once")
    model = build(MODELS, SHAPE)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        daemon = stack.enter_context(start_daemon(l1_bytes))
        say("the start of four servers")
        servers = {
            name: stack.enter_context(start(version, model, folder, name, daemon.socket))
            for name in (*MODES, "another")
        }
        for server in servers.values():
            server.wait_ready().generate(words(NEW, "warm-up"), 1)
        for server in servers.values():
            os.killpg(server.process.pid, signal.SIGSTOP)
        figures = {"version": __version__, "sglang": version, "rounds": rounds}
        say(f"a prompt that was seen, {rounds} rounds")
        figures |= measure_hits(servers, rounds)
        say(f"new prompts, {rounds} rounds")
        return figures | measure_new(servers, rounds)


def start(version: str, model: Path, folder: Path, name: str, socket: str) -> Server:
    """``another`` is a second server with kvass."""
    kvass = {"kvass.socket": socket, "kvass.fixed_weights": True}
    files = folder / "files"
    files.mkdir(exist_ok=True)
    more: tuple[str, ...] = ()
    if name == "file":
        more = ("--hicache-storage-backend", "file")
    return Server(
        version,
        model,
        folder / f"{name}.log",
        page=PAGE,
        more=more,
        extra=backend_config() | kvass if name in ("kvass", "another") else None,
        env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(files)},
    )


@contextmanager
def awake(server: Server) -> Iterator[Server]:
    """Within it, this server runs."""
    os.killpg(server.process.pid, signal.SIGCONT)
    yield server
    os.killpg(server.process.pid, signal.SIGSTOP)


def timed(server: Server, tokens: list[int], *, flush: bool) -> tuple[float, Answer]:
    with awake(server):
        server.generate(SHORT, 1)
        if flush:
            server.flush()
        began_s = time.perf_counter()
        answer = server.generate(tokens, 1)
        return time.perf_counter() - began_s, answer


def measure_hits(servers: Servers, rounds: int) -> dict[str, Any]:
    """Raises ``Unavailable`` if a hit is missing."""
    prompt = words(PROMPT, "document")
    cold_s = [timed(servers["none"], prompt, flush=True)[0]]
    computed = {name: stored(servers[name], prompt).tokens for name in CACHED}
    times: dict[str, list[float]] = {name: [] for name in MODES}
    for number in range(rounds):
        for name in rotated(MODES, number):
            took_s, answer = timed(servers[name], prompt, flush=name != "none")
            if answer.cached < FOUND:
                raise Unavailable(f"{name}: {answer.cached} of {PROMPT} tokens were found")
            times[name].append(took_s)
        if number < COLD:
            cold_s.append(timed(servers["none"], words(PROMPT, number), flush=True)[0])
            timed(servers["none"], prompt, flush=False)
    other = timed(servers["another"], prompt, flush=False)[1]
    return {
        "cold_s": median(cold_s),
        "local_s": median(times["none"]),
        **{f"{name}_s": median(times[name]) for name in CACHED},
        "kvass_vs_file": ratio(times["kvass"], times["file"]),
        "kvass_vs_cold": median(cold_s) / median(times["kvass"]),
        "shared": other.stored >= FOUND and other.tokens == computed["kvass"],
    }


def stored(server: Server, prompt: list[int]) -> Answer:
    """Compute ``prompt``, and wait until all of it is stored; the first answer."""
    deadline_s = time.monotonic() + STORED_S
    with awake(server):
        first = server.generate(prompt, 1)
        while True:
            server.flush()
            if server.generate(prompt, 1).cached >= FOUND:
                return first
            if time.monotonic() > deadline_s:
                raise Unavailable(f"a prompt was not stored within {STORED_S:.0f} s")


def measure_new(servers: Servers, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in MODES}
    for number in range(rounds):
        for name in rotated(MODES, number):
            times[name].append(timed(servers[name], words(NEW, (name, number)), flush=False)[0])
    return {f"new_{name}_vs_none": ratio(times[name], times["none"]) for name in CACHED}


def rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Another one comes first in each round."""
    by %= len(names)
    return names[by:] + names[:by]
