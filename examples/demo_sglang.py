"""Two SGLang servers, one KV cache: what the second one saves. As ``examples/demo.py``, on a CPU.

Server A computes a long prompt; server B, another process, gets the same prompt and one that shares
its prefix, and loads what A computed. Then B computes both prompts itself, with keys of their own
(SGLang's ``extra_key``), so that no cache is read, to compare.

Exit status 1 if B hit nothing or if a single token differs. Run it with ``make demo-sglang``.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from examples.demo import (
    CACHE,
    NEW_TOKENS,
    PROMPT_TOKENS,
    SHAPE,
    SHARED_TOKENS,
    WARM_UP_TOKENS,
    Row,
    report,
    step,
    verdict,
)
from kvass._version import TESTED_SGLANG
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.sglang.server import ANSWER_S, Server
from tests.support.vllm.models import build
from tests.support.vllm.process import Answer

PAGE: Final = 64
STORED_S: Final = 60.0


def main() -> int:
    """Run the demo; the exit status."""
    print("kvass demo: two SGLang servers share one KV cache through the daemon\n")
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
    env = {"KVASS": daemon.socket, "KVASS_FIXED_WEIGHTS": "yes"}
    with step("starting two servers (a minute)"):
        version = max(TESTED_SGLANG)
        a, b = (
            stack.enter_context(Server(version, model, folder / f"{n}.log", page=PAGE, env=env))
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
    with step("warming both servers with another prompt: A computes it, B computes and loads it"):
        ask(a, warm_up)
        wait_stored(daemon, len(warm_up) // PAGE)
        ask(b, warm_up, "uncached")
        ask(b, warm_up)
    already = rows_of(daemon)
    with step(f"server A (pid {a.process.pid}) computes {PROMPT_TOKENS} tokens"):
        first = ask(a, prompt)
    wait_stored(daemon, already + PROMPT_TOKENS // PAGE)
    with step(f"server B (pid {b.process.pid}) gets the same prompt"):
        second = ask(b, prompt)
    b.flush()  # or SGLang's own cache in B would answer for the shared prefix
    with step(f"server B gets one that shares {SHARED_TOKENS} tokens with it"):
        third = ask(b, shared)
    with step("server B computes both itself, reading no cache, to compare"):
        truth = ask(b, prompt, "uncached 1")
        shared_truth = ask(b, shared, "uncached 2")
    return [
        Row(f"A {a.process.pid} computes", prompt, first, truth),
        Row(f"B {b.process.pid} same prompt", prompt, second, truth),
        Row(f"B {b.process.pid} shared prefix", shared, third, shared_truth),
        Row(f"B {b.process.pid} uncached", prompt, truth, truth),
        Row(f"B {b.process.pid} uncached, shared", shared, shared_truth, shared_truth),
    ]


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


def rows_of(daemon: Daemon) -> int:
    namespaces = daemon.status()["namespaces"]
    return sum(int(group["rows"]) for namespace in namespaces for group in namespace["groups"])


def wait_stored(daemon: Daemon, count: int) -> None:
    """Wait until the daemon has ``count`` pages."""
    deadline = time.monotonic() + STORED_S
    while rows_of(daemon) < count and time.monotonic() < deadline:
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
