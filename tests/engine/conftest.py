"""Real vLLM engines for the tests of this folder, each a process of its own, shared by many cases.

``plain`` runs without kvass and is the judge (``tests/support/vllm/judge.py``): its local prefix
hits are what a load is compared with. ``a`` and ``b`` share one daemon; the pages of ``b`` are on a
fake GPU.
"""

from __future__ import annotations

import itertools
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.arena import memory
from kvass.messages import Hello, Welcome
from kvass.testing.daemon import Daemon, running_daemon
from kvass.wire.channel import Channel
from tests import side_by_side
from tests.support.template import Template
from tests.support.vllm.judge import Judge
from tests.support.vllm.models import TINY, build, write_lora
from tests.support.vllm.process import ENVIRONMENT, Answer, EngineProcess, Prompt

ROOT: Final = Path(__file__).parent.parent.parent
CHUNK: Final = 256
BLOCK: Final = 32
ARGS: Final[dict[str, Any]] = {
    "max_model_len": 4096,
    "num_gpu_blocks_override": 512,
    "max_num_batched_tokens": 512,  # longer prompts are prefilled in chunks
}
UNCOMPILED: Final = {"TORCHDYNAMO_DISABLE": "1"}
"""For imports of torch. vLLM compiles a function of its sampler, which takes 2 s of each engine."""
LORA: Final[dict[str, Any]] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}


def pytest_configure(config: pytest.Config) -> None:
    if where := config.getoption("pages"):
        EngineProcess.all_on_gpu = where == "gpu"
    place = side_by_side.folder(config) / "vllm.sock"
    environment = {**os.environ, **ENVIRONMENT, **UNCOMPILED}
    EngineProcess.template = Template(place, environment, "tests.support.vllm.preloaded")


def store(engine: EngineProcess, tokens: list[int], max_tokens: int = 1, **fields: Any) -> Answer:
    """Run ``tokens`` until all their blocks are cached outside the engine; its first answer.

    Once is enough, except of an adapter that the engine's ranks must report first.
    """
    (first,) = engine.store(Prompt(tokens, max_tokens, **fields))
    for _ in range(20):
        assert engine.reset()
        if engine.one(tokens, 1, **fields).external >= (len(tokens) - 1) // BLOCK * BLOCK:
            assert engine.reset()
            return first
    raise AssertionError("never stored")


Starter = Callable[..., EngineProcess]


GPU: Final[dict[str, Any]] = {"kv_connector_module_path": "tests.support.vllm.fake_gpu_connector"}
"""For ``StubModelEngine``: its pages are on a fake GPU."""


@pytest.fixture
def pages(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Where the next engine of this process has its pages: in turn on the host and on a fake GPU.
    Which comes first differs from test to test."""
    return itertools.cycle([GPU, {}] if zlib.crc32(request.node.nodeid.encode()) % 2 else [{}, GPU])


@pytest.fixture(scope="session")
def model() -> Path:
    return build(ROOT / ".cache" / "models")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def start(model: Path, folder: Path) -> Iterator[Starter]:
    """Start an engine by name; all are killed at the end.

    Patient, but where a test is about not waiting: a busy machine leaves out no store of a test.
    """
    engines: list[EngineProcess] = []

    def start_one(name: str, *, folder_of: Path | None = None, **fields: Any) -> EngineProcess:
        args = {**ARGS, **fields.pop("args", {})}
        log = folder / f"{name}.log"
        fields = {"patient": True, **fields}
        engines.append(EngineProcess(folder_of or model, log, args=args, **fields))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def adapters(folder: Path) -> Path:
    """A folder of LoRA adapters, older than all engines."""
    for seed, name in enumerate(("one", "other", *"ABCDEFGHIJ")):
        write_lora(folder / "adapters" / name, TINY, seed=seed)
    return folder / "adapters"


@pytest.fixture(scope="session")
def judge(start: Starter) -> Judge:
    return Judge(start("plain", args=LORA))


NOTHING_OWED: Final[dict[str, Any]] = {
    "leases": 0,
    "reservations": 0,
    "pins": 0,
    "quarantined_bytes": 0,
    "rows_loading": 0,
}


@contextmanager
def arena_of(daemon: Daemon) -> Iterator[Any]:
    """The daemon's whole arena, uint8, to damage it as no well-behaved client would."""
    channel = Channel.connect(daemon.socket, 5.0)
    channel.send(Hello(wants_arena=True, clock_s=time.monotonic()))
    (welcome,) = channel.receive(5.0)
    assert isinstance(welcome, Welcome)
    descriptor = channel.take_fd()
    assert descriptor is not None
    arena = memory.attach(descriptor, welcome.arena_bytes)
    yield arena.buffer
    arena.close()
    channel.close()


def empty(daemon: Daemon) -> dict[str, Any]:
    """Wait until nothing is owed by anybody; the daemon's status then."""
    return daemon.wait_until(**NOTHING_OWED)


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Of one test, without engines. A module names it ``daemon``."""
    with running_daemon(tmp_path) as one:
        yield one


@pytest.fixture(scope="session")
def daemon(folder: Path) -> Iterator[Daemon]:
    # Patient, so that a busy machine makes no miss of a hit that a test is about.
    with running_daemon(folder, l1_size="256MiB", lookup_budget_ms=10_000) as one:
        yield one


def event_endpoints(daemon: Daemon) -> dict[str, str]:
    """Where engine ``a`` publishes its KV events."""
    names = ("endpoint", "replay_endpoint")
    return {name: f"ipc://{Path(daemon.socket).parent}/{name}" for name in names}


@pytest.fixture(scope="session")
def pair(daemon: Daemon, start: Starter, adapters: Path) -> tuple[EngineProcess, EngineProcess]:
    """Two engines of one daemon, started side by side; the first publishes KV events."""
    socket = Path(daemon.socket)
    endpoints = event_endpoints(daemon)
    events = {"enable_kv_cache_events": True, **endpoints}
    a = start("a", socket=socket, args=LORA | {"kv_events_config": events})
    b = start("b", socket=socket, gpu=True, args=LORA)
    return a.wait_ready(), b.wait_ready()


@pytest.fixture
def a(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    return pair[0]


@pytest.fixture
def b(pair: tuple[EngineProcess, EngineProcess]) -> EngineProcess:
    """The second engine, its own prefix cache empty."""
    assert pair[1].reset()
    return pair[1]


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Make a prompt of so many tokens that no other test uses; each call makes another one."""
    rng = random.Random(request.node.nodeid)

    def make(tokens: int) -> list[int]:
        return [rng.randrange(4, TINY.vocab) for _ in range(tokens)]

    return make
