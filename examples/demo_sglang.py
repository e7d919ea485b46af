"""Two SGLang servers, one KV cache: what the second one saves. As ``examples/demo.py``, on a CPU.

Server A reads a long text and answers a question; server B, another process, gets the same prompt
and a second question about the text, and loads what A computed. Then B computes both prompts
itself, with keys of their own (SGLang's ``extra_key``), so that no cache is read, to compare.

Exit status 1 if B hit nothing or if a single token differs. Run it with ``make demo-sglang``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from examples.demo import Row, introduced, rows_of, step, told
from examples.demo_questions import L1, NEW_TOKENS, Questions
from kvass._version import TESTED_SGLANG
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.sglang.server import ANSWER_S, Server
from tests.support.vllm.process import Answer

PAGE: Final = 64
FLOAT: Final = ("--dtype", "float32")
"""On most CPUs faster than bfloat16."""
STORED_S: Final = 60.0


def main() -> int:
    """Run the demo; the exit status."""
    print("kvass demo: two SGLang servers share one KV cache through the daemon\n")
    asked = introduced()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-demo-"))
        rows = play(asked, Path(folder), stack)
    return told(asked, rows)


def play(asked: Questions, folder: Path, stack: ExitStack) -> list[Row]:
    """Start everything, run the prompts; the table's rows."""
    with step("starting the daemon"):
        daemon = stack.enter_context(running_daemon(folder, l1_size=L1))
    print(f"    {daemon.ready}")
    env = {"KVASS": daemon.socket, "KVASS_FIXED_WEIGHTS": "yes"}
    with step("starting two servers (a minute)"):
        version = max(TESTED_SGLANG)
        a, b = (
            stack.enter_context(
                Server(version, asked.model, folder / f"{n}.log", page=PAGE, env=env, more=FLOAT)
            )
            for n in "ab"
        )
        a.wait_ready()
        b.wait_ready()
    with step("warming both servers with another prompt: A computes it, B computes and loads it"):
        ask(a, asked.warm_up)
        wait_stored(daemon, len(asked.warm_up) // PAGE)
        ask(b, asked.warm_up, "uncached")
        ask(b, asked.warm_up)
    already, (one, other) = pages_of(daemon), asked.prompts
    pids = a.process.pid, b.process.pid
    with step(f"server A (pid {pids[0]}) computes {len(one):,} tokens and answers question 1"):
        first = ask(a, one)
    wait_stored(daemon, already + len(one) // PAGE)
    with step(f"server B (pid {pids[1]}) gets the same prompt"):
        second = ask(b, one)
    b.flush()  # or SGLang's own cache in B would answer for the shared prefix
    with step(f"server B gets question 2, which shares {asked.shared:,} tokens with it"):
        third = ask(b, other)
    with step("server B computes both itself, reading no cache, to compare"):
        truth = ask(b, one, "uncached 1")
        other_truth = ask(b, other, "uncached 2")
    return rows_of(asked, pids, (first, second, third, truth, other_truth))


def ask(server: Server, prompt: list[int], key: str | None = None) -> Answer:
    """The answer to ``prompt``, streamed. Prompts with different ``key``s share nothing."""
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "extra_key": key, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    start, first_s = time.monotonic(), 0.0
    with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - start
                found = json.loads(line[6:])
    meta = found["meta_info"]
    stored = (meta.get("cached_tokens_details") or {}).get("storage") or 0
    local = meta["cached_tokens"] - stored
    return Answer(found["output_ids"], [], local, stored, first_s, time.monotonic() - start)


def pages_of(daemon: Daemon) -> int:
    namespaces = daemon.status()["namespaces"]
    return sum(int(group["rows"]) for namespace in namespaces for group in namespace["groups"])


def wait_stored(daemon: Daemon, count: int) -> None:
    """Wait until the daemon has ``count`` pages."""
    deadline = time.monotonic() + STORED_S
    while pages_of(daemon) < count and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
