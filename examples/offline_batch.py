"""Offline batches over a shared prefix: a later job loads the prefix that an earlier one computed.

A job is a process with a vLLM engine that answers eight questions about one document.
``python -m examples.offline_batch`` starts a daemon and runs two jobs. One job with a daemon of
yours::

    python -m examples.offline_batch --socket PATH --questions 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from examples.tiny import daemon_at, engine_here, greedy, some_prompt

DOCUMENT = some_prompt(2000, seed=0)


def main() -> None:
    """One job, or two."""
    parser = argparse.ArgumentParser(prog="python -m examples.offline_batch")
    parser.add_argument(
        "--socket", help="run one job with this daemon (default: start one, run two)"
    )
    parser.add_argument("--questions", type=int, default=1, metavar="SEED", help="which questions")
    args = parser.parse_args()
    if args.socket:
        job(args.socket, args.questions)
        return
    with daemon_at(None) as socket:
        for questions in (1, 2):
            flags = ["--socket", socket, "--questions", str(questions)]
            subprocess.run([sys.executable, "-m", "examples.offline_batch", *flags], check=True)


def job(socket: str, questions: int) -> None:
    """Answer eight questions, and print how many tokens of each request were cached."""
    first = 8 * questions
    prompts = [DOCUMENT + some_prompt(100, seed=first + n) for n in range(8)]
    engine = engine_here(socket)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(inputs, greedy(), use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    tokens = sum(map(len, prompts))
    print(f"job {questions}: {tokens} prompt tokens, {sum(cached)} cached; each request: {cached}")


if __name__ == "__main__":
    main()
