"""Two vLLM processes, one KV cache: what the second one saves.

A small random-weight llama is built, the daemon and two engine processes are started. Engine A
computes a long prompt; engine B, another process, gets the same prompt and one that shares its
prefix, and loads what A computed. Then B computes both prompts itself, reading no cache: that is
the time and the text the loads are compared with, in the same process, warm in the same way.

Exit status 1 if B hit nothing or if a single token differs. Run it with ``make demo``.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvass.testing.daemon import running_daemon
from tests.support.vllm.models import Shape, build
from tests.support.vllm.process import Answer, EngineProcess

CACHE: Final = Path(__file__).parent.parent / ".cache" / "models"
SHAPE: Final = Shape(vocab=4096, hidden=512, intermediate=1408, layers=6, heads=8, head_dim=64)
ENGINE: Final = {"max_model_len": 6144, "num_gpu_blocks_override": 640}
PROMPT_TOKENS: Final = 4200
SHARED_TOKENS: Final = 3300
WARM_UP_TOKENS: Final = 700
NEW_TOKENS: Final = 16


class Row(NamedTuple):
    """A line of the table; ``truth`` is the same prompt computed without any cache, in B."""

    who: str
    prompt: list[int]
    answer: Answer
    truth: Answer

    @property
    def same(self) -> bool:
        return self.answer.tokens == self.truth.tokens


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what takes time, and how long it took."""
    print(f"  {what} ...", end="", flush=True)
    start = time.monotonic()
    yield
    print(f" {time.monotonic() - start:.1f} s", flush=True)


def main() -> int:
    """Run the demo; the exit status."""
    print("kvass demo: two vLLM processes share one KV cache through the daemon\n")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-demo-"))
        rows = play(Path(folder), stack)
    print()
    report(rows)
    return verdict(rows)


def play(folder: Path, stack: ExitStack) -> list[Row]:
    """Start everything, run the prompts; the table's rows."""
    with step("building a random-weight model"):
        model = build(CACHE, SHAPE)
    with step("starting the daemon"):
        daemon = stack.enter_context(running_daemon(folder, l1_size="512MiB"))
    print(f"    {daemon.ready}")
    with step("starting two engine processes (half a minute)"):
        socket = Path(daemon.socket)
        a, b = (
            stack.enter_context(
                EngineProcess(model, folder / f"{n}.log", socket=socket, args=ENGINE)
            )
            for n in "ab"
        )
        a.wait_ready()
        b.wait_ready()
    words = random.Random(7)
    warm_up, prompt, other_end = (
        [words.randrange(4, SHAPE.vocab) for _ in range(n)]
        for n in (WARM_UP_TOKENS, PROMPT_TOKENS, PROMPT_TOKENS - SHARED_TOKENS)
    )
    shared = prompt[:SHARED_TOKENS] + other_end
    with step("warming both engines with another prompt: A computes it, B computes and loads it"):
        a.one(warm_up, NEW_TOKENS)
        b.one(warm_up, NEW_TOKENS, skip_prefix_cache=True)
        b.reset()
        b.one(warm_up, NEW_TOKENS)
    with step(f"engine A (pid {a.pid}) computes {PROMPT_TOKENS} tokens"):
        first = a.one(prompt, NEW_TOKENS)
    with step(f"engine B (pid {b.pid}) gets the same prompt"):
        second = b.one(prompt, NEW_TOKENS)
    b.reset()  # or vLLM's own cache in B would answer for the shared prefix
    with step(f"engine B gets one that shares {SHARED_TOKENS} tokens with it"):
        third = b.one(shared, NEW_TOKENS)
    with step("engine B computes both itself, reading no cache, to compare"):
        truth = b.one(prompt, NEW_TOKENS, skip_prefix_cache=True)
        shared_truth = b.one(shared, NEW_TOKENS, skip_prefix_cache=True)
    return [
        Row(f"A {a.pid} computes", prompt, first, truth),
        Row(f"B {b.pid} same prompt", prompt, second, truth),
        Row(f"B {b.pid} shared prefix", shared, third, shared_truth),
        Row(f"B {b.pid} uncached", prompt, truth, truth),
        Row(f"B {b.pid} uncached, shared", shared, shared_truth, shared_truth),
    ]


def report(rows: list[Row]) -> None:
    """Print the table."""
    head = ("process", "prompt tokens", "cached tokens", "first token", "speed-up", "same tokens")
    cells = [
        (
            row.who,
            str(len(row.prompt)),
            str(row.answer.cached),
            f"{row.answer.first_token_s * 1e3:,.0f} ms",
            f"{row.truth.first_token_s / row.answer.first_token_s:.1f}x"
            if row.answer.cached
            else "-",
            "-" if row.answer is row.truth else "yes" if row.same else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    for line in [head, tuple("-" * width for width in widths), *cells]:
        left, *right = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([left, *right]))
    print(
        "\nspeed-up: time to first token of the same prompt in the same process, uncached / cached"
    )


def verdict(rows: list[Row]) -> int:
    """0 if every prompt of B hit and every token is the same; else say what went wrong."""
    _, *hits = rows[:3]
    if any(row.answer.external == 0 for row in hits):
        print("\nFAILED: engine B loaded nothing", file=sys.stderr)
        return 1
    if not all(row.same for row in rows):
        print("\nsame tokens: NO", file=sys.stderr)
        return 1
    print("same tokens: yes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
