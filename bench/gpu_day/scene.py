"""What the stages share: models of random weights, a daemon, and engines that live on.

Engines are of one runner, and of one model, but for those of ``SHORT``. On a GPU there are at most
``Sizes.most`` at a time. In a smoke run models are tiny, pages are on a fake GPU, engines are
forked, and engines that differ in what no fake shows are one (``SAME``).

If V2 runs no engine here, V1 runs all of them from then on: a figure of the stage says why.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from bench.gpu_day.day import last_words
from bench.gpu_day.sizes import SMOKE, Sizes
from bench.gpu_day.stages import Note
from kvass.errors import ConfigError, Unavailable
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.template import Template
from tests.support.vllm.models import Shape, build, config_of, tensors_of
from tests.support.vllm.process import ENVIRONMENT, Answer, EngineDied, EngineProcess

MODELS: Final = Path(__file__).parents[2] / ".cache" / "models"
SHORT: Final = ("short", "short_staged")
SAME: Final = {"short": "kvass", "plain": "kvass", "second": "short_staged"}
ALWAYS: Final = {"kvass.skip_slow_loads": False}
"""Load also where computing is faster: to measure it."""
PATIENCE_S: Final = 60.0
START_S: Final = 150.0
"""In which an engine starts, or never."""


class Scene:
    """Used by one process, in ``folder``. ``forks``: where a template is, or is to be. ``runner``:
    of all stages, if it is given."""

    def __init__(
        self, folder: Path, smoke: bool, forks: str, runner: str, sizes: Sizes | None = None
    ) -> None:
        self.folder, self.smoke, self.runner = folder, smoke, runner
        self.sizes = sizes or (SMOKE if smoke else Sizes())
        self._ending = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._runner = ""
        self._came_up = False
        self._note: Note = _nowhere
        if smoke:
            environment = {**os.environ, **ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"}
            place = Path(forks or folder / "forks")
            EngineProcess.template = Template(place, environment, "tests.support.vllm.preloaded")
            EngineProcess.template.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_engines()
        self._ending.close()

    def begin(self, runner: str, note: Note) -> None:
        """A stage begins, of this runner of vLLM."""
        self._note, runner = note, self.runner or runner
        if runner != self._runner:
            self.kill_engines()
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = self._runner = runner
            self._came_up = False

    def gives_up_v2(self, why: str) -> bool:
        """Whether V2 was to run, and ran no engine yet. Then V1 runs from now on."""
        if self._runner != "1" or self._came_up or self.runner:
            return False
        self._note(v2_refused=why)
        self.runner = "0"
        self.begin("0", self._note)
        return True

    @cached_property
    def model(self) -> Path:
        """The model's folder."""
        return self._made("model", self.sizes.shape)

    @cached_property
    def short_model(self) -> Path:
        """That of ``SHORT``."""
        return self._made("short-model", self.sizes.short_shape)

    def _made(self, name: str, shape: Shape) -> Path:
        if self.smoke:
            return build(MODELS, shape)
        folder = self.folder / name
        if not folder.exists():  # else an earlier process of this run has made it
            scratch = self.folder / f"{name}.{os.getpid()}"
            write_model(scratch, shape)
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
        """Engines of these kinds; those that are new start at once, and are warmed up. Raises
        ConfigError if so many do not fit, EngineDied if one does not start."""
        found = self._up(kinds)
        for died in found.values():
            if isinstance(died, EngineDied):
                raise died
        return {kind: one for kind, one in found.items() if isinstance(one, EngineProcess)}

    def those_that_start(self, *kinds: str) -> dict[str, EngineProcess]:
        """The same, of as many as fit, without those that do not start: a figure says why. The
        first one must."""
        found = self._up(kinds[: max(1, self.sizes.most)])
        for kind, one in found.items():
            if isinstance(one, EngineDied):
                if kind == kinds[0]:
                    raise one
                self._note(**{f"{kind}_did_not_start": last_words(one)})
        return {kind: one for kind, one in found.items() if isinstance(one, EngineProcess)}

    def _up(self, kinds: Sequence[str]) -> dict[str, EngineProcess | EngineDied]:
        if len(kinds) > self.sizes.most:
            raise ConfigError(f"{len(kinds)} engines do not fit: room for {self.sizes.most}")
        names = {kind: SAME.get(kind, kind) if self.smoke else kind for kind in kinds}
        new = [name for name in dict.fromkeys(names.values()) if name not in self._engines]
        others = [name for name in self._engines if name not in names.values()]
        others.sort(key="kvass".__eq__)  # most stages have that one
        for name in others[: max(0, len(self._engines) + len(new) - self.sizes.most)]:
            self.kill(name)
        died = dict[str, EngineDied]()
        for name in new:
            self._engines[name] = self._start(name)
            if self.smoke and not self._came_up:  # V2 refuses on a CPU: once is enough
                self.ready(self._engines[name])
        for name in new:
            try:
                self._warm_up(self.ready(self._engines[name]), name)
            except EngineDied as one:
                died[name] = one
                self.kill(name)
        return {kind: died.get(name) or self._engines[name] for kind, name in names.items()}

    def ready(self, engine: EngineProcess) -> EngineProcess:
        """Wait until it is up, and known to the daemon if it uses that. Raises EngineDied."""
        engine.wait_ready()
        if engine.uses_kvass:
            engine.wait_connected(PATIENCE_S)
        if not self._came_up:
            self._came_up = True
            self._note(runner=f"V{1 + int(self._runner)}")
        return engine

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
        return EngineProcess(model, log, args=args, start_timeout_s=START_S, **more)

    @property
    def _options(self) -> dict[str, Any]:
        """What a tiny model computes is never slower than its load."""
        return dict(ALWAYS) if self.smoke else {}

    def _start(self, kind: str) -> EngineProcess:
        more: dict[str, Any] = {"gpu": self.smoke and kind != "shadow"}
        match kind:
            case "native" | "native_in_step":
                more["transfer"] = self._native(in_step=kind == "native_in_step")
            case "in_step":
                more["module"] = "bench.gpu_day.in_step_connector"
                more["options"] = ALWAYS
            case "plain" | "short":
                more["options"] = ALWAYS
            case "short_staged":
                more["options"] = {**ALWAYS, "kvass.gpu_stages": True}
                more["variables"] = {"VLLM_LOGGING_LEVEL": "INFO"}  # it says what it measured
            case "blocks":
                more["options"] = {"kvass.kv_layout": "blocks"}
            case "shadow":
                more["options"] = {"kvass.shadow": True}
            case "sampled":
                more["options"] = {"kvass.verify": self.sizes.sample}
        model = self.short_model if kind in SHORT else self.model
        return self.start(kind, model, self.sizes.args, **more)

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


def write_model(folder: Path, shape: Shape, device: str = "cuda") -> None:
    """A model in bfloat16, drawn by torch on the GPU: a CPU would take minutes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = config_of(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    torch.manual_seed(0)
    weights = {
        one.name: (torch.randn(one.size, device=device) * one.deviation + one.mean)
        .to(torch.bfloat16)
        .cpu()
        for one in tensors_of(shape)
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if device == "cuda":
        torch.cuda.empty_cache()


def _nowhere(**figures: Any) -> None:
    """Before a stage begins."""
