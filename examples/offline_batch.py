"""Offline batches over a shared prefix: a later job loads the prefix that an earlier one computed.

Each run is one job: eight questions about one document, in a vLLM engine of this process. Start a
daemon, and run it as often as you like::

    python -m examples.offline_batch --questions 1
    python -m examples.offline_batch --questions 2
"""

from __future__ import annotations

import argparse

from examples.tiny import engine_here, greedy, some_prompt

DOCUMENT = some_prompt(2000, seed=0)


def main() -> None:
    """One job."""
    parser = argparse.ArgumentParser(prog="python -m examples.offline_batch")
    parser.add_argument("--socket", default="", help="the daemon's socket")
    parser.add_argument("--questions", type=int, default=1, metavar="SEED", help="which questions")
    args = parser.parse_args()
    first = 8 * args.questions
    prompts = [DOCUMENT + some_prompt(100, seed=first + n) for n in range(8)]
    engine = engine_here(args.socket)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(inputs, greedy(), use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    print(f"{sum(map(len, prompts))} prompt tokens, {sum(cached)} cached; each request: {cached}")


if __name__ == "__main__":
    main()
