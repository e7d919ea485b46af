"""Disaggregated prefill over the cache: one vLLM server computes prompts, another one answers.

``python -m examples.disaggregated_prefill`` starts a daemon, two servers of a tiny random-weight
model and the proxy with ``--prefill``. Exit status 1 if the decode server computed a stored block.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples.serving import Reply, ask, running_proxy, two_servers
from examples.tiny import PATIENT_MS, some_prompt, whole_blocks


def play(folder: Path, servers: list[str], prompts: list[list[int]]) -> list[Reply]:
    """The decode server's answers. ``servers`` are the prefill server and the decode server."""
    prefill, decode = servers
    with running_proxy(folder, "--prefill", prefill, decode) as proxy:
        return [ask(proxy, prompt) for prompt in prompts]


def main() -> int:
    """Run the recipe; the exit status."""
    prompts = [some_prompt(tokens, seed=tokens) for tokens in (1000, 2000, 3000)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with two_servers(folder, lookup_budget_ms=PATIENT_MS) as servers:
            replies = play(folder, servers, prompts)
            computed = [ask(servers[0], prompt) for prompt in prompts]
    for reply in replies:
        print(f"decode server: {reply.prompt_tokens} prompt tokens, {reply.cached} cached")
    same = [reply.tokens for reply in replies] == [reply.tokens for reply in computed]
    print(f"same tokens as the prefill server's: {'yes' if same else 'NO'}")
    hit = all(reply.cached == whole_blocks(reply.prompt_tokens) for reply in replies)
    return 0 if same and hit else 1


if __name__ == "__main__":
    sys.exit(main())
