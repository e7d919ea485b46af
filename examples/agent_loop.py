"""An agent's session: each request says when the next one comes, and the last one ends the session.

``python -m examples.agent_loop`` starts a daemon with a tier and a server of a tiny random-weight
model. With a model of yours pass ``messages`` to ``client.chat.completions.create``: ``extra_body``
is the same.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

from examples.serving import servers
from examples.tiny import some_prompt, transfer_config
from kvass.client.client import Client
from kvass.testing.daemon import running_daemon

TURNS: Final = 5


def play(url: str, prompt: list[int], session: str, seed: int = 1) -> Iterator[Any]:
    """What kvass did for each turn of an agent, whose prompts begin with ``prompt``. Between two
    turns the caller runs a tool."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    for number in range(1, TURNS + 1):
        prompt = prompt + some_prompt(100, seed=100 * seed + number)  # a tool's result
        hints = {"kvass.ttl": 0} if number == TURNS else {"kvass.then": "30s"}
        params = {**hints, "kvass.report": True}
        body: dict[str, Any] = {"session_id": session, "kv_transfer_params": params}
        body |= {"ignore_eos": True, "return_token_ids": True}
        reply: Any = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=32, temperature=0, extra_body=body
        )
        prompt = prompt + reply.choices[0].model_extra["token_ids"]
        yield reply.model_extra["kv_transfer_params"]["kvass"]


def main() -> int:
    """Run the recipe; the exit status."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as disk:
        daemon = running_daemon(Path(name), l1_size="256MiB", tier=[f"disk:{disk}?capacity=1GiB"])
        with daemon as d, servers(Path(name), d, [transfer_config(d.socket)]) as (url,):
            for _ in play(url, some_prompt(512, seed=1), "agent-7"):
                with Client(d.socket) as client:  # the tool is almost done, sooner than it said
                    there = client.ask_session("agent-7", fetch=True)
                print(f"L1 has {there.hit_chunks} of the session's {there.chunks} chunks")
                time.sleep(0.1)
            counters = d.status()["counters"]
    print(f"sessions ended: {counters['sessions_ended']}")
    return 0 if there.hit_chunks == there.chunks and counters["session_rows_ended"] else 1


if __name__ == "__main__":
    sys.exit(main())
