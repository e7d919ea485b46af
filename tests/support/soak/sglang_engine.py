"""A real SGLang server of a soak: answers must be those of a server without kvass.

``answers`` has them ready, as of ``vllm_engine``. The server's own cache is flushed before each
request; so what is found comes from kvass. All its processes are in this process's group, so they
are killed and suspended with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from kvass._version import TESTED_SGLANG
from kvass.connectors.sglang.plugin import backend_config
from tests.support.sglang import server as sglang
from tests.support.sglang.server import Server
from tests.support.soak.engine import Line, Setup, prompts, requests, tell
from tests.support.soak.vllm_engine import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    MOST_CHUNKS,
    PROMPTS,
    Expected,
    differs,
    tokens_of,
)
from tests.support.vllm.judge import SAME, apart
from tests.support.vllm.models import build
from tests.support.vllm.process import Answer

VERSION: Final = max(TESTED_SGLANG)
NOISE: Final = 3.0
"""An answer may be so many times farther off than the server is from itself."""
LEAST_NOISE: Final = 30 * SAME
"""What was computed in other steps may differ more than a hit of the server's own cache."""


@contextmanager
def _server(folder: Path, name: str, socket: str = "") -> Iterator[Server]:
    extra = None
    if socket:
        extra = backend_config() | {
            "kvass.socket": socket,
            "kvass.tenant": "sglang",
            "kvass.fixed_weights": True,
            "prefetch_threshold": CHUNK_TOKENS,
        }
    model, log = build(folder / "models"), folder / f"{name}.log"
    more = ("--dtype", "float32")  # a hit and a computation differ less than with bfloat16
    with Server(
        VERSION, model, log, page=CHUNK_TOKENS, more=more, extra=extra, own_session=False
    ) as server:
        yield server.wait_ready()


def _ask(server: Server, tokens: list[int]) -> Answer:
    """``external``: what came from the storage backend."""
    answer = server.generate(tokens, ANSWER_TOKENS, return_logprob=True)
    local = answer.cached - answer.stored
    return Answer(answer.tokens, answer.logprobs, local, answer.stored, 0.0, 0.0)


def write_answers(trace: Path, folder: Path) -> str:
    """Ask a server without kvass; the path of the file. ``noise``: a hit of its own cache against
    what it computed."""
    chosen = [tokens_of(pieces) for pieces in islice(requests(trace, MOST_CHUNKS), PROMPTS)]
    with _server(folder, "sglang-plain") as plain:
        answers, noise = [], LEAST_NOISE
        for tokens in chosen:
            plain.flush()
            answers.append(_ask(plain, tokens))
            noise = max(noise, apart(_ask(plain, tokens), answers[-1]))
    assert NOISE * noise < 0.5, "too much noise to prove anything"
    file = folder / "sglang-answers.json"
    file.write_bytes(msgspec.json.encode(Expected(chosen, answers, NOISE * noise)))
    return str(file)


def play(setup: Setup) -> None:
    file = Path(setup.answers)
    expected = msgspec.json.decode(file.read_bytes(), type=Expected)
    with _server(file.parent, f"sglang-server-{setup.number}", setup.socket) as server:
        tell(Line(setup.first))
        for n, _ in prompts(setup):
            number, began_s = n % len(expected.prompts), time.monotonic()
            tokens = expected.prompts[number]
            server.flush()
            answer = _ask(server, tokens)
            hit = answer.external // CHUNK_TOKENS
            wrong = differs(answer, expected.answers[number], expected.noise)
            asked_chunks, s = len(tokens) // CHUNK_TOKENS, round(time.monotonic() - began_s, 3)
            tell(Line(n, asked_chunks, hit, hit, s, wrong and f"hit {answer.external}: {wrong}"))
            if wrong:
                return


def installed() -> bool:
    """Whether the overlay of ``VERSION`` is there."""
    folder = sglang.overlays()
    return folder is not None and (folder / f"sglang-{VERSION}").exists()


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Setup))
