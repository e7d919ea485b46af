"""Two vLLM servers behind a round-robin proxy: the second one hits what the first one computed.

``python -m examples.two_replicas`` starts a daemon, two servers of a tiny random-weight model and
the proxy, and sends one prompt twice. Exit status 1 if the second server computed a stored block.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from examples.serving import Reply, ask, running_proxy, two_servers
from examples.tiny import some_prompt, whole_blocks


def play(folder: Path, servers: list[str], prompt: list[int]) -> list[Reply]:
    """The answers to ``prompt``, which the proxy gets once for each server."""
    with running_proxy(folder, *servers) as proxy:
        return [ask(proxy, prompt) for _ in servers]


def main() -> int:
    """Run the recipe; the exit status."""
    with tempfile.TemporaryDirectory() as name, two_servers(Path(name)) as servers:
        first, second = play(Path(name), servers, some_prompt(1000, seed=1))
    for who, reply in (("first", first), ("second", second)):
        print(f"{who} server: {reply.prompt_tokens} prompt tokens, {reply.cached} cached")
    same = first.tokens == second.tokens
    print(f"same tokens: {'yes' if same else 'NO'}")
    return 0 if same and second.cached == whole_blocks(second.prompt_tokens) else 1


if __name__ == "__main__":
    sys.exit(main())
