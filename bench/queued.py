"""``python -m bench.queued``: prompts in a disk tier, whose requests wait behind a full batch.

Two real vLLM engines on this machine's CPU, one thread each, with a tiny model of 8 KiB per token;
one begins promotions while requests wait, the other does not (``kvass.early_lookups`` 0). In each
round, in turns, four requests fill the batch and decode, and eight prompts of 2,048 tokens, which
only the disk has, come behind them. The disk gives 200 MB/s (``throttled``): 0.7 s for all. All is
loaded, although such a model computes it faster. Prints, as JSON, the mean time to
the first token of the eight, for how long the four decode, and the difference: medians over
``--rounds``.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from bench.engine import ENVIRONMENT, MODELS, rotated
from kvass.cli.bench.rig import say, start_daemon, wait_for
from kvass.client.client import Client
from kvass.errors import Unavailable
from kvass.tiers.base import Shards
from kvass.tiers.disk import DiskTier
from tests.support.vllm.models import Shape, build
from tests.support.vllm.process import EngineProcess, Prompt

SHAPE: Final = Shape(hidden=128, intermediate=256, layers=8, heads=2, kv_heads=2, head_dim=64)
BATCH, QUEUED, TOKENS = 4, 8, 2048
EARLY: Final = {"early": 8, "late": 0}
L1_BYTES: Final = 512 << 20
ARGS: Final[dict[str, Any]] = {
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_seqs": BATCH,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 300 << 20,
    "num_gpu_blocks_override": (BATCH + QUEUED) * TOKENS // 32,
}
WAIT_S: Final = 60.0


def throttled(folder: str, mb_s: str) -> DiskTier:
    """A disk tier (a plug-in) that loads so many megabytes per second."""
    disk, lock, free_s = DiskTier(folder, 4 << 30), threading.Lock(), 0.0
    load, rate = disk.load, float(mb_s) * 1e6

    def slowly(keys: Sequence[bytes], into: Sequence[Shards]) -> list[bool]:
        nonlocal free_s
        size = sum(len(part) for shards in into for part in shards)
        with lock:
            free_s = max(free_s, time.monotonic()) + size / rate
            until_s = free_s
        found = load(keys, into)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return found

    disk.load = slowly  # type: ignore[method-assign]
    return disk


def words(count: int, seed: object) -> list[int]:
    """A random prompt."""
    rng = random.Random(repr(seed))
    return [rng.randrange(4, SHAPE.vocab) for _ in range(count)]


def measure(rounds: int, decode: int, mb_s: float) -> dict[str, float]:
    """The figures. ``decode``: how many tokens each of the four makes."""
    prompts = [words(TOKENS, n) for n in range(QUEUED)]
    first_s: dict[str, list[float]] = {name: [] for name in EARLY}
    busy_s: dict[str, list[float]] = {name: [] for name in EARLY}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-bench-")))
        (folder / "disk").mkdir()
        tier = f"bench.queued:throttled?folder={folder / 'disk'}&mb_s={mb_s:g}"
        patient = "--skip-slow-loads", "no", "--lookup-budget-ms", "10000"
        daemon = stack.enter_context(start_daemon(L1_BYTES, "--tier", tier, *patient))
        client = stack.enter_context(Client(daemon.socket))
        say("the start of two engines")
        engines = {
            name: stack.enter_context(
                EngineProcess(
                    build(MODELS, SHAPE),
                    folder / f"{name}.log",
                    socket=Path(daemon.socket),
                    args=ARGS,
                    options={"kvass.early_lookups": most},
                    environment=ENVIRONMENT,
                )
            )
            for name, most in EARLY.items()
        }
        for engine in engines.values():
            engine.wait_ready().one(words(300, "warm-up"), 2)
        engines["late"].store(*(Prompt(prompt, 1) for prompt in prompts))
        wait_for(lambda: flushed(client), "the disk", WAIT_S)
        for number in range(rounds):
            for name in rotated([*EARLY], number):
                engine = engines[name]
                client.clear_tenant("default")  # in L1 alone
                if not engine.reset():
                    raise Unavailable("the engine's own cache could not be emptied")
                batch = [Prompt(words(32, (name, number, n)), decode) for n in range(BATCH)]
                answers = engine.generate(*batch, *(Prompt(each, 4) for each in prompts))
                if any(answer.external < TOKENS - 256 for answer in answers[BATCH:]):
                    raise Unavailable(f"{name}: {[one.external for one in answers[BATCH:]]}")
                first_s[name].append(mean(one.first_token_s for one in answers[BATCH:]))
                busy_s[name].append(max(one.total_s for one in answers[:BATCH]))
                say(f"{name} {first_s[name][-1]:.3f} s, batch {busy_s[name][-1]:.3f} s")
        early = client.status()["counters"]["prefetches"]
    ratios = [a / b for a, b in zip(first_s["early"], first_s["late"], strict=True)]
    return {
        **{f"{name}_first_token_s": median(times) for name, times in first_s.items()},
        **{f"{name}_batch_s": median(times) for name, times in busy_s.items()},
        **{f"{name}_after_batch_s": median(after(first_s[name], busy_s[name])) for name in EARLY},
        "early_vs_late": median(ratios),
        "best": min(ratios),
        "worst": max(ratios),
        "prefetches": early,
    }


def after(first_s: list[float], busy_s: list[float]) -> list[float]:
    """What the requests wait when the batch has ended: on a busy machine the batch is noise."""
    return [first - busy for first, busy in zip(first_s, busy_s, strict=True)]


def flushed(client: Client) -> bool:
    """Whether the tier has all that was stored."""
    (tier,) = client.status()["tiers"]
    return not tier["flush_queue_rows"] and not tier["storing_bytes"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decode", type=int, default=100, help="tokens that the batch decodes")
    parser.add_argument("--mb-s", type=float, default=200.0, help="of the disk")
    asked = parser.parse_args()
    print(json.dumps(measure(asked.rounds, asked.decode, asked.mb_s), indent=1))


if __name__ == "__main__":
    main()
