"""Two vLLM processes, one KV cache: what the second one saves.

The daemon and two engine processes are started. Engine A reads a long text and answers a question;
engine B, another process, gets the same prompt and a second question about the text, and loads what
A computed. Then B computes both prompts itself, reading no cache: that is the time and the text the
loads are compared with, in the same process, warm in the same way.

Exit status 1 if B hit nothing or if a single token differs. Run it with ``make demo``.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from examples.demo_questions import L1, NEW_TOKENS, Questions, questions
from kvass.testing.daemon import running_daemon
from tests.support.vllm.process import Answer, EngineProcess

ENGINE: Final = {"max_model_len": 6144, "num_gpu_blocks_override": 320}


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
    asked = introduced()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-demo-"))
        rows = play(asked, Path(folder), stack)
    return told(asked, rows)


def introduced() -> Questions:
    """What is asked; and say of which model."""
    asked = questions()
    real = "a pretrained model, SmolLM2-135M-Instruct, reads a text and answers questions about it"
    print(f"  {real if asked.asked else 'no pretrained model: random weights and random tokens'}")
    return asked


def play(asked: Questions, folder: Path, stack: ExitStack) -> list[Row]:
    """Start everything, run the prompts; the table's rows."""
    with step("starting the daemon"):
        daemon = stack.enter_context(running_daemon(folder, l1_size=L1))
    print(f"    {daemon.ready}")
    with step("starting two engine processes (half a minute)"):
        socket = Path(daemon.socket)
        a, b = (
            stack.enter_context(
                EngineProcess(asked.model, folder / f"{n}.log", socket=socket, args=ENGINE)
            )
            for n in "ab"
        )
        a.wait_ready()
        b.wait_ready()
    with step("warming both engines with another prompt: A computes it, B computes and loads it"):
        a.one(asked.warm_up, 16)
        b.one(asked.warm_up, 16, skip_prefix_cache=True)
        b.reset()
        b.one(asked.warm_up, 16)
    one, other = asked.prompts
    with step(f"engine A (pid {a.pid}) computes {len(one):,} tokens and answers question 1"):
        first = a.one(one, NEW_TOKENS)
    with step(f"engine B (pid {b.pid}) gets the same prompt"):
        second = b.one(one, NEW_TOKENS)
    b.reset()  # or vLLM's own cache in B would answer for the shared prefix
    with step(f"engine B gets question 2, which shares {asked.shared:,} tokens with it"):
        third = b.one(other, NEW_TOKENS)
    with step("engine B computes both itself, reading no cache, to compare"):
        truth = b.one(one, NEW_TOKENS, skip_prefix_cache=True)
        other_truth = b.one(other, NEW_TOKENS, skip_prefix_cache=True)
    return rows_of(asked, (a.pid, b.pid), (first, second, third, truth, other_truth))


def rows_of(asked: Questions, pids: tuple[int, int], answers: tuple[Answer, ...]) -> list[Row]:
    """The table's rows. ``answers``: of A to the first prompt, of B to both, of B without cache."""
    (a, b), (one, other), (*_, truth, other_truth) = pids, asked.prompts, answers
    names = ("A computes", "B same prompt", "B question 2", "B uncached", "B uncached, question 2")
    numbers = (a, b, b, b, b)
    return [
        Row(name.replace(" ", f" {number} ", 1), prompt, answer, compared)
        for name, number, prompt, answer, compared in zip(
            names,
            numbers,
            (one, one, other, one, other),
            answers,
            (truth, truth, other_truth, truth, other_truth),
            strict=True,
        )
    ]


def told(asked: Questions, rows: list[Row]) -> int:
    """Print the answers, the table and the verdict; the exit status."""
    print()
    if words := asked.words:
        for question, row in zip(asked.asked, rows[1:3], strict=True):
            print(f"{question}\n{textwrap.indent(textwrap.fill(words(row.answer.tokens)), '  ')}")
        print()
    report(rows)
    return verdict(rows)


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
