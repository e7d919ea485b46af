"""An agent's session: retain what all sessions begin with, and say when the session ends.

``python -m examples.agent_loop`` starts a daemon and a server of a tiny random-weight model and
talks to it with the OpenAI client. With a model of yours pass ``messages`` to
``client.chat.completions.create``: ``extra_body`` is the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from openai import OpenAI

from examples.serving import servers
from examples.tiny import some_prompt, transfer_config
from kvass.testing.daemon import running_daemon

TURNS: Final = 5


def turn(client: OpenAI, prompt: list[int], session: str, **hints: Any) -> tuple[list[int], Any]:
    """One request of a session. Returns the prompt with the answer, and what kvass did."""
    asked = {f"kvass.{name}": value for name, value in {**hints, "report": True}.items()}
    reply = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=32,
        temperature=0,
        extra_body={
            "session_id": session,
            "kv_transfer_params": asked,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    extra: Any = reply.model_extra
    choice: Any = reply.choices[0].model_extra
    return prompt + choice["token_ids"], extra["kv_transfer_params"]["kvass"]


def play(url: str, system: list[int], session: str, seed: int = 1) -> Iterator[Any]:
    """What kvass did for each turn of an agent, whose prompts begin with ``system``. The last turn
    ends the session."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    prompt = system
    for number in range(1, TURNS + 1):
        prompt = prompt + some_prompt(100, seed=100 * seed + number)  # a tool's result
        hints = {"ttl": 0} if number == TURNS else {}
        prompt, did = turn(client, prompt, session, **hints)
        yield did


def main() -> int:
    """Run the recipe; the exit status."""
    with (
        tempfile.TemporaryDirectory() as name,
        running_daemon(Path(name), l1_size="256MiB") as daemon,
        servers(Path(name), daemon, [transfer_config(daemon.socket)]) as (url,),
    ):
        system = some_prompt(512, seed=1)
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        turn(client, system, "setup", ttl="1h")
        kept = turn(client, system, "setup", ttl="1h")[1]["kept_tokens"]
        print(f"retained: {kept} tokens")
        for _ in play(url, system, "agent-7"):
            pass
        counters = daemon.status()["counters"]
    print(f"sessions ended: {counters['sessions_ended']}")
    return 0 if kept and counters["session_rows_ended"] else 1


if __name__ == "__main__":
    sys.exit(main())
