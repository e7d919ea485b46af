"""What the stages share: a model of random weights, a daemon, and engines that live on.

Engines are of one model and one runner. On a GPU there are at most ``MOST`` at a time. In a smoke
run the model is tiny, pages are on a fake GPU, and engines are forked.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvass.errors import Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.template import Template
from tests.support.vllm.models import TINY, Shape, build, config_of, tensors_of
from tests.support.vllm.process import ENVIRONMENT, Answer, EngineProcess

MODELS: Final = Path(__file__).parents[2] / ".cache" / "models"
SHAPE: Final = Shape(
    vocab=32_000,
    hidden=3072,
    intermediate=8192,
    layers=28,
    heads=24,
    kv_heads=8,
    head_dim=128,
    max_tokens=65_536,
)
"""Llama-3.2-3B, but for its vocabulary: 112 KiB of KV per token."""
GIB: Final = 1 << 30
ARGS: Final[dict[str, Any]] = {
    "dtype": "bfloat16",
    "block_size": 16,
    "max_model_len": 34_000,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 6 * GIB,
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    },
}
MOST: Final = 4
"""Of 14 GiB each."""
PATIENCE_S: Final = 60.0


class Sizes(msgspec.Struct, frozen=True):
    """How much of it: on a GPU. ``crowd`` requests at once, each of ``crowds`` tokens: of the last
    ones the engine's cache does not hold all. Lengths are a multiple of the block and one more: all
    find as much, and compute one token."""

    shape: Shape = SHAPE
    block: int = 16
    args: dict[str, Any] = msgspec.field(default_factory=lambda: ARGS)
    host_bytes: int = 16 * GIB
    rounds: int = 5
    warm_up: tuple[int, ...] = (3000, 9000)
    verified: int = 18
    kinds: tuple[str, ...] = ("kvass", "blocks", "native", "native_in_step")
    lengths: tuple[int, ...] = (513, 2049, 8193, 32_001)
    usual: int = 2049
    crowd: int = 16
    crowds: tuple[int, ...] = (513, 2049, 4001)
    short: tuple[int, ...] = (32, 128, 512, 2048)
    decoders: int = 8
    answer: int = 200
    newcomer: int = 4001
    sample: int = 8


SMOKE: Final = Sizes(
    shape=TINY,
    block=32,
    args={
        "block_size": 32,
        "max_model_len": 1536,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": 64,
    },
    host_bytes=128 << 20,
    rounds=1,
    warm_up=(),
    verified=18,
    kinds=("kvass", "native"),
    lengths=(513,),
    usual=513,
    crowd=4,
    crowds=(257, 705),
    short=(64,),
    decoders=2,
    answer=24,
    newcomer=257,
    sample=2,
)


class Scene:
    """Used by one process, in ``folder``. ``forks``: where a template is, or is to be. ``runner``:
    of all stages, if it is given."""

    def __init__(self, folder: Path, smoke: bool, forks: str, runner: str) -> None:
        self.folder, self.smoke, self.runner = folder, smoke, runner
        self.sizes = SMOKE if smoke else Sizes()
        self._ending = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._runner = ""
        if smoke:
            environment = {**os.environ, **ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
            place = Path(forks or folder / "forks")
            EngineProcess.template = Template(place, environment, "tests.support.vllm.preloaded")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_engines()
        self._ending.close()

    def begin(self, runner: str) -> None:
        """A stage begins, of this runner of vLLM. On a CPU there is one for all."""
        if not self.smoke and runner != self._runner:
            self.kill_engines()
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = self._runner = runner

    @cached_property
    def model(self) -> Path:
        """The model's folder."""
        if self.smoke:
            return build(MODELS, self.sizes.shape)
        folder = self.folder / "model"
        if not folder.exists():  # else an earlier process of this run has made it
            scratch = self.folder / f"model.{os.getpid()}"
            write_model(scratch, self.sizes.shape)
            scratch.rename(folder)
        return folder

    @cached_property
    def daemon(self) -> Daemon:
        """All engines'; its arena is populated."""
        folder = self.folder / f"daemon.{os.getpid()}"
        folder.mkdir()
        size = str(self.sizes.host_bytes)
        more: dict[str, Any] = {"lookup_budget_ms": 10_000} if self.smoke else {}
        daemon = self._ending.enter_context(running_daemon(folder, size, **more))
        daemon.wait_until(PATIENCE_S, l1_populated_bytes=daemon.status()["l1_capacity_bytes"])
        return daemon

    # ------------------------------------------------------------ engines

    def engines(self, *kinds: str) -> dict[str, EngineProcess]:
        """Engines of these kinds; those that are new start at once, and are warmed up."""
        new = [kind for kind in kinds if kind not in self._engines]
        others = [kind for kind in self._engines if kind not in kinds]
        for kind in others[: max(0, len(self._engines) + len(new) - MOST)]:
            if not self.smoke:
                self.kill(kind)
        for kind in new:
            self._engines[kind] = self._start(kind)
        for kind in new:
            self._warm_up(self._engines[kind].wait_ready(), kind)
        return {kind: self._engines[kind] for kind in kinds}

    def kill(self, kind: str) -> None:
        """``kill -9`` an engine."""
        self._engines.pop(kind).kill()

    def kill_engines(self) -> None:
        """All of them: to end in good order takes some of them 20 s."""
        for kind in list(self._engines):
            self.kill(kind)

    def start(self, name: str, model: Path, args: Mapping[str, Any], **more: Any) -> EngineProcess:
        """An engine that is the caller's to end, by default with kvass."""
        if "transfer" not in more:
            more |= {"socket": Path(self.daemon.socket), "patient": self.smoke}
            more["options"] = self._options | more.get("options", {})
        log = self.folder / f"{name}.{os.getpid()}.log"
        return EngineProcess(model, log, args=args, **more)

    @property
    def _options(self) -> dict[str, Any]:
        """What a tiny model computes is never slower than its load."""
        return {"kvass.skip_slow_loads": False} if self.smoke else {}

    def _start(self, kind: str) -> EngineProcess:
        more: dict[str, Any] = {"gpu": self.smoke and kind != "shadow"}
        match kind:
            case "native" | "native_in_step":
                more["transfer"] = self._native(in_step=kind == "native_in_step")
            case "in_step":
                more["module"] = "bench.gpu_day.in_step_connector"
            case "blocks":
                more["options"] = {"kvass.kv_layout": "blocks"}
            case "shadow":
                more["options"] = {"kvass.shadow": True}
            case "sampled":
                more["options"] = {"kvass.verify": self.sizes.sample}
        return self.start(kind, self.model, self.sizes.args, **more)

    def _native(self, *, in_step: bool) -> dict[str, Any]:
        """vLLM's own offloading, with as much host memory. ``in_step``: it loads up to 16 MiB
        inside a step (from vLLM 0.33 on)."""
        extra: dict[str, Any] = {"cpu_bytes_to_use": self.sizes.host_bytes}
        extra["sync_load_budget_bytes"] = (16 << 20) * in_step
        if self.smoke:
            spec = {"spec_name": "HostOffloadingSpec", "block_size": self.sizes.block}
            extra |= spec | {"spec_module_path": "bench.peers.offloading_spec"}
        both = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        return both | {"kv_connector_extra_config": extra}

    def _warm_up(self, engine: EngineProcess, kind: str) -> None:
        """Compile and capture, pin, and verify."""
        for length in self.sizes.warm_up:
            engine.one(self.words(length, (kind, "warm-up")), 4)
        if self.smoke and kind != "sampled":
            return
        for number in range(self.sizes.verified):
            prompt = self.words(300, (kind, "verified", number))
            engine.one(prompt, 1)
            self.hit(engine, prompt, 1)

    # ------------------------------------------------------------ requests

    def words(self, count: int, seed: object) -> list[int]:
        """A random prompt."""
        rng = random.Random(repr(seed))
        return [rng.randrange(4, self.sizes.shape.vocab) for _ in range(count)]

    def stored(self) -> None:
        """Wait until engines have stored what they computed: vLLM's own offloading does not say."""
        time.sleep(0.02 if self.smoke else 0.2)
        self.daemon.wait_until(PATIENCE_S, reservations=0)

    def empty(self, engine: EngineProcess) -> None:
        """The next hit comes from host memory."""
        if not engine.reset():
            raise Unavailable("the engine's own cache could not be emptied")

    def hit(self, engine: EngineProcess, prompt: list[int], tokens: int = 4) -> Answer:
        """A prompt again, without the engine's own cache."""
        self.stored()
        self.empty(engine)
        return engine.one(prompt, tokens)


def write_model(folder: Path, shape: Shape) -> None:
    """A model in bfloat16, drawn by torch on the GPU: numpy would take minutes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = config_of(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    weights = {
        one.name: (torch.randn(one.size, device=device) * one.deviation + one.mean)
        .to(torch.bfloat16)
        .cpu()
        for one in tensors_of(shape)
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    torch.cuda.empty_cache()
