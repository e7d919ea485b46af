"""A vLLM engine of a soak over two nodes, each with a daemon of its own (``NodesWorld``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from tests.support.soak import vllm_engine
from tests.support.soak.engine import Setup
from tests.support.soak.nodes import second_socket
from tests.support.soak.vllm_engine import ARGS, CHUNK_TOKENS
from tests.support.vllm.models import Sizes, build
from tests.support.vllm.nodes import NodesEngine

write_answers = partial(vllm_engine.write_answers, name="nodes-answers.json")


@contextmanager
def _engine(folder: Path, name: str, model: Sizes, socket: Path) -> Iterator[NodesEngine]:
    engine = NodesEngine(
        build(folder / "models", model),
        folder / f"{name}.log",
        [socket, second_socket(socket)],
        args=ARGS,
        options={"kvass.chunk_tokens": CHUNK_TOKENS},
    )
    with engine:
        engine.wait_ready()
        yield engine


if __name__ == "__main__":
    vllm_engine.play(msgspec.json.decode(sys.argv[1], type=Setup), start=_engine)
