"""A reinforcement-learning loop in one process: generate, update the weights in place, reset.

kvass sees the update. ``reset_prefix_cache()`` after it empties vLLM's own cache: no later request
finds what the old weights computed. With a daemon running::

    python -m examples.rl_loop

The last policy shows what is wrong without it. Exit status 1 if another one reused anything, or if
the last one did not go wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from examples.tiny import engine_here, greedy, some_prompt

PROMPT = {"prompt_token_ids": some_prompt(1000, seed=0)}


def main() -> int:
    """Run the loop; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.rl_loop")
    parser.add_argument("--socket", default="", help="the daemon's socket")
    engine = engine_here(parser.parse_args().socket)
    policies = []
    for policy in range(3):
        policies.append(generation(engine, f"policy {policy}"))
        engine.apply_model(update)
        reset(engine)
    policies.append(generation(engine, "policy 3"))
    engine.apply_model(update)
    cached, right = generation(engine, "policy 4, after no reset")
    return 0 if all(one == (0, True) for one in policies) and cached and not right else 1


def generation(engine: Any, policy: str) -> tuple[int, bool]:
    """Prompt tokens found in a cache, and whether computing all of them gives the same answer."""
    cached, tokens = rollout(engine)
    _, computed = rollout(engine, skip_reading_prefix_cache=True)
    same = "yes" if tokens == computed else "NO"
    print(f"{policy}: {cached} prompt tokens cached, same tokens as computed: {same}")
    return cached, tokens == computed


def rollout(engine: Any, **fields: Any) -> tuple[int, list[int]]:
    """Prompt tokens found in a cache, and the generated tokens."""
    (output,) = engine.generate([PROMPT], greedy(**fields), use_tqdm=False)
    return output.num_cached_tokens, list(output.outputs[0].token_ids)


def update(model: Any) -> None:
    """In the place of a trainer: every token is embedded as the one before it was."""
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.data.copy_(weight.data.roll(1, 0))


def reset(engine: Any) -> None:
    """Empty the prefix cache. Blocks of stores in progress are held until some steps later."""
    while not engine.reset_prefix_cache():
        engine.llm_engine.step()


if __name__ == "__main__":
    sys.exit(main())
