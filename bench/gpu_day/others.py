"""Tests, copies and the other engines: the first stage, and stages a and g.

What copies are, stands at the top of ``bench.gpu``, and of short pieces at that of
``bench.gpu.stages``. ``N_cold_ms`` and ``N_loaded_ms`` of transformers: ``generate`` of one token,
alone and with a loaded prefix of a prompt of N tokens; ``equal_tokens`` of four. Of SGLang: a
request for one token, new, and after its own cache was flushed; ``shared``: whether a second server
found what the first one stored.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.geometries import geometry
from bench.gpu import NEED_BYTES, Sizes, measure_gpu
from bench.gpu.gil import measure_gil
from bench.gpu.stages import measure_stages
from bench.gpu.torch_device import open_device
from bench.gpu_day.scene import MODELS, Scene
from bench.gpu_day.sizes import FULL_TOKENS
from bench.gpu_day.stages import Note
from kvass._version import TESTED_SGLANG
from kvass.errors import ConfigError, Unavailable
from tests.support.vllm.models import Shape, build

ROOT: Final = Path(__file__).parents[2]
BY_WORTH: Final = [
    f"tests/gpu/test_gpu_{name}.py"
    for name in ("copies", "stages", "processes", "graphs", "footprint")
]
ENGINES: Final = ["tests/gpu/test_gpu_engines.py"]
SMOKE_TESTS: Final = ["tests/gpu/test_gpu_graphs.py", "-k", "alone and fake", "-p", "no:xdist"]
RESULT: Final = re.compile(r"^(\S+::.+) (PASSED|FAILED|ERROR|SKIPPED)")


def tests(scene: Scene, note: Note) -> None:
    """``pytest tests/gpu``, by worth."""
    _pytest(note, SMOKE_TESTS if scene.smoke else [*BY_WORTH, "-m", "gpu"])


def engine_tests(scene: Scene, note: Note) -> None:
    """Those with engines: each model takes the start of two."""
    if scene.smoke:
        raise ConfigError("its models need a GPU")
    scene.kill_engines()
    _pytest(note, [*ENGINES, "-m", "gpu"])


def _pytest(note: Note, which: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *which]
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    bad: list[str] = []
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
            if (found := RESULT.match(line)) is not None:
                result = found[2].lower()
                counts[result] += 1
                if result in ("failed", "error"):
                    bad.append(found[1].partition("::")[2])
                note(**counts, not_passed=", ".join(bad))
    if not counts["passed"] and not bad:
        raise Unavailable(f"no test ran: {last}")
    if bad or pytest.returncode:
        note(all_passed=False, exit_status=pytest.returncode)


def copies(scene: Scene, note: Note) -> None:
    """Every geometry, both ways, short pieces."""
    if scene.smoke:
        from tests.bench.fake_gpu import FakeDevice

        tiny = replace(geometry("gpt_oss"), chunk_tokens=32)
        sizes = Sizes(geometries=(tiny,), tokens=scene.sizes.tokens, gemm=tiny, pin_bytes=1 << 20)
        note(**measure_gpu(FakeDevice(), 1, sizes, note))
    else:
        tokens = scene.sizes.tokens
        needed = Sizes(tokens=tokens, need_bytes=NEED_BYTES // (FULL_TOKENS // tokens))
        note(**measure_gpu(open_device(), scene.sizes.rounds, needed, note))


def short(scene: Scene, note: Note) -> None:
    """Short pieces with stages and without, and what else could copy them."""
    if scene.smoke:
        from tests.bench.fake_gpu import FakeDevice

        tiny = replace(geometry("gpt_oss"), chunk_tokens=32)
        measure_stages(FakeDevice(), 1, (tiny,), scene.sizes.tokens, 1, note)
    else:
        rounds, tokens = scene.sizes.rounds, scene.sizes.tokens
        measure_stages(open_device(), rounds, tokens=tokens, note=note)


def gil(scene: Scene, note: Note) -> None:
    """A load in pieces, and in one."""
    if scene.smoke:
        from tests.support.gpu.paced_gpu import PacedDevice

        paced: Any = PacedDevice()
        note(**measure_gil(paced, 1))
    else:
        note(**measure_gil(open_device(), 4 * scene.sizes.rounds))


# ---------------------------------------------------------------- transformers


def hugging_face(scene: Scene, note: Note) -> None:
    """A model in this process."""
    import torch

    from kvass.connectors.transformers import connect
    from tests.support import hf_models

    large: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
    }
    model = hf_models.make("llama", 0, **({} if scene.smoke else large))
    where = "cpu" if scene.smoke else "cuda"
    model = model.to(where)
    terms: dict[str, Any] = {"socket": scene.daemon.socket, "chunk_tokens": hf_models.CHUNK}

    def timed(call: Any, ids: Any, count: int) -> tuple[float, Any]:
        began_s = time.perf_counter()
        found = call(ids, max_new_tokens=count, do_sample=False)
        if where != "cpu":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began_s), found[0, ids.shape[1] :].tolist()

    with connect(model, wait_s=30.0, **terms) as cached:
        for length in (321,) if scene.smoke else (513, 2049, 4001):
            times: dict[str, list[float]] = {"cold": [], "loaded": []}
            equal, loaded = 4, length
            for number in range(scene.sizes.rounds):
                ids = hf_models.prompt(length, seed=1000 * length + number).to(where)
                times["cold"].append(timed(model.generate, ids, 1)[0])
                cached.generate(ids, max_new_tokens=1, do_sample=False)
                scene.stored()
                times["loaded"].append(timed(cached.generate, ids, 1)[0])
                loaded = min(loaded, cached.last.loaded)
                pair = [timed(call, ids, 4)[1] for call in (model.generate, cached.generate)]
                equal = min(equal, sum(a == b for a, b in zip(*pair, strict=True)))
            figures = {f"{length}_{name}_ms": median(took) for name, took in times.items()}
            note(**figures, **{f"{length}_loaded": loaded, f"{length}_equal_tokens": equal})
    note(no_errors=not cached.counters)


# ---------------------------------------------------------------- SGLang

ON_A_GPU: Final = {
    "--dtype": "bfloat16",
    "--mem-fraction-static": "0.3",
    "--hicache-size": "4",
    "--hicache-write-policy": "write_through",
    "--hicache-storage-prefetch-policy": "wait_complete",
    "--hicache-io-backend": "direct",
    "--hicache-mem-layout": "page_first_direct",
}
"""A server's flags, in the place of those for a CPU."""
PAGE: Final = 64
PROMPT: Final = 2011


def sglang(scene: Scene, note: Note) -> None:
    """Two servers."""
    from kvass.connectors.sglang.plugin import backend_config
    from tests.support.sglang.server import Server, overlays

    version = max(TESTED_SGLANG) if overlays() is not None else ""
    if not version and find_spec("sglang") is None:
        raise ConfigError("sglang not installed")
    sizes = Shape(vocab=4096, hidden=1024, intermediate=8192, layers=8, heads=16, head_dim=64)
    model = build(MODELS, Shape(intermediate=8192) if scene.smoke else sizes)
    extra = backend_config()
    extra |= {"kvass.socket": scene.daemon.socket, "kvass.fixed_weights": True}
    more: dict[str, Any] = {"own_session": False}
    more |= {} if scene.smoke else {"flags": ON_A_GPU}
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(
                Server(version, model, scene.folder / f"{name}.log", page=PAGE, extra=extra, **more)
            )
            for name in ("sglang-one", "sglang-other")
        )
        for server in (one, other):
            server.wait_ready().generate(scene.words(100, "warm-up"), 1)
        cold: list[float] = []
        loaded: list[float] = []
        for number in range(scene.sizes.rounds):
            prompt = [token % 1000 for token in scene.words(PROMPT, ("sglang", number))]
            cold.append(_timed(one, prompt))
            scene.stored()
            one.flush()
            loaded.append(_timed(one, prompt))
            note(sglang_cold_ms=median(cold), sglang_loaded_ms=median(loaded))
        answer = other.generate(prompt, 1)
        note(sglang_stored=answer.stored, shared=answer.stored >= (PROMPT - 1) // PAGE * PAGE)


def _timed(server: Any, prompt: list[int]) -> float:
    began_s = time.perf_counter()
    server.generate(prompt, 1)
    return 1000 * (time.perf_counter() - began_s)
