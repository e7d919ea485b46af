"""What is right on a GPU, and what notices if it is not: stages c, d and e.

- ``M_..._apart``: the largest difference of log probabilities between two answers of one engine to
  the same prompts of a model M (``judge.apart``): both ``cold``, both after vLLM's own hit
  (``local``), both after a load (``loaded``), and of a load and vLLM's own hit (``sides``).
  ``M_local``, ``M_loaded``: tokens found. ``M_default``: why it did not start as vLLM would by
  default.
- ``shadow_...``: what shadow mode says. ``no_wrong_row``: no value differs by more than rounding
  does. ``flip_seen``: with one byte of each load flipped, a sample (``kvass.verify``) found it;
  ``flip_jobs``: after so many loads.
- ``right_...``: the tokens of an answer, although the daemon was killed ``before`` or ``amid`` a
  load, or amid a ``store``, are those of before. ``longest_hook_ms``: of the connector meanwhile.
  ``back_s``: until hits came back. ``engine_freed_s``: until the daemon owed nothing to an engine
  that was killed amid stores; ``engine_equal``: of its six prompts, those to which another one
  answers as without kvass (on a GPU kernels round otherwise where more is computed).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from bench.gpu_day.day import last_words
from bench.gpu_day.scene import MODELS, PATIENCE_S, Scene
from bench.gpu_day.sizes import SMALL_CACHE
from bench.gpu_day.stages import Note
from kvass.errors import Unavailable
from tests.support.vllm import hybrid_models
from tests.support.vllm.judge import apart
from tests.support.vllm.models import Blueprint, build
from tests.support.vllm.process import EngineDied, EngineProcess, Prompt, Settings

DTYPE: Final = {"dtype": "bfloat16"}
TWINS: Final[dict[str, tuple[Callable[[], Blueprint], dict[str, Any], dict[str, Any]]]] = {
    "gpt_oss": (hybrid_models.gpt_oss, {}, {}),
    "states": (
        hybrid_models.qwen3_next,
        {"block_size": None, "mamba_cache_mode": "align"},
        {"gdn_prefill_backend": "triton"},
    ),
}
"""Of a model: its arguments, and those without which it does not start where FlashInfer is not
installed: on Hopper vLLM takes that for states, whether it is there or not."""
STORES: Final = 6
NOTHING: Final[dict[str, Any]] = {"max_offload_tokens": 0, "max_load_tokens": 0}
OWED: Final = {"leases": 0, "reservations": 0, "pins": 0, "quarantined_bytes": 0}


def twins(scene: Scene, note: Note) -> None:
    """Stage c."""
    for name, (blueprint, args, needed) in TWINS.items():
        memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
        args = DTYPE | {"max_model_len": 4096, "block_size": scene.sizes.block} | args
        args |= SMALL_CACHE if scene.smoke else memory
        args = {key: value for key, value in args.items() if value is not None}
        model = build(MODELS, blueprint())
        tries = [args, args | needed]
        if needed and not scene.smoke and find_spec("flashinfer") is None:
            note(**{f"{name}_default": "FlashInfer is not installed"})
            del tries[0]  # a start takes most of a minute
        for more in tries:
            engine = scene.start(name, model, more, gpu=scene.smoke)
            try:
                _compare(scene, note, name, scene.ready(engine))
                break
            except EngineDied as died:
                note(**{f"{name}_default": last_words(died)})
                if more == tries[-1]:
                    raise
            finally:
                engine.kill()  # to end in good order takes seconds


def _compare(scene: Scene, note: Note, name: str, engine: EngineProcess) -> None:
    most: dict[str, float] = {}
    found = {"local": 0, "loaded": 0}
    for length in scene.sizes.twins:
        prompt = scene.words(length, (name, length))
        prompt = [4 + token % (hybrid_models.VOCAB - 4) for token in prompt]
        cold = [engine.one(prompt, 8, salt=salt) for salt in "ab"]
        local = [engine.one(prompt, 8, salt="a") for _ in range(2)]
        loaded = []
        for _ in range(2):
            scene.stored()
            scene.empty(engine)
            loaded.append(engine.one(prompt, 8, salt="a"))
        pairs = {"cold": cold, "local": local, "loaded": loaded, "sides": [local[0], loaded[0]]}
        for what, (one, other) in pairs.items():
            most[what] = max(apart(one, other), most.get(what, 0.0))
        found["local"] += local[0].local
        found["loaded"] += loaded[0].external
        apart_by = {f"{name}_{what}_apart": value for what, value in most.items()}
        note(**apart_by, **{f"{name}_{what}": tokens for what, tokens in found.items()})


def shadow(scene: Scene, note: Note) -> None:
    """Stage d."""
    engines = scene.engines("shadow", "sampled")
    one, length = engines["shadow"], scene.sizes.usual
    for number in range(scene.sizes.rounds):
        prompt = scene.words(length, ("shadow", number))
        one.one(prompt, 4)
        scene.hit(one, prompt)
    said = _shadow_of(scene, scene.sizes.rounds)
    figures = {name: said[name] for name in ("loads", "hit_tokens", "not_compared", "saved_s")}
    note(**{f"shadow_{name}": value for name, value in figures.items()})
    worst = max(group["largest_difference"] for group in said["groups"])
    note(shadow_difference=worst, no_wrong_row=said["wrong_rows"] == 0)
    _flip(scene, note, engines["sampled"])


def _shadow_of(scene: Scene, loads: int) -> dict[str, Any]:
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        for row in scene.daemon.status()["engines"]:
            said: dict[str, Any] | None = row["shadow"]
            if said is not None and said["loads"] >= loads:
                return said
        time.sleep(0.05)
    raise Unavailable(f"shadow mode has not reported {loads} loads")


def _flip(scene: Scene, note: Note, engine: EngineProcess) -> None:
    """After the first copies, which are verified anyway."""
    prompts = [scene.words(300, ("flip", number)) for number in range(4)]
    for prompt in prompts:
        engine.one(prompt, 1)
    engine.disturb(Settings(flip="load"))
    jobs, seen = 0, False
    while not seen and jobs < 4 * scene.sizes.sample:
        scene.hit(engine, prompts[jobs % len(prompts)], 1)
        jobs += 1
        seen = "rank 0: a load in layer group 0 (" in engine.log()
    note(flip_seen=seen, flip_jobs=jobs)


def kills(scene: Scene, note: Note) -> None:
    """Stage e."""
    engine = scene.engines("kvass")["kvass"]
    whens = {
        "before": ("start_load_kv", "before", 0.0),
        "amid": ("start_load_kv", "after", 0.002),
        "store": ("wait_for_save", "after", 0.0),
    }
    for name, (hook, when, after_s) in whens.items():
        prompt = scene.words(scene.sizes.usual, ("kill", name))
        expected = engine.one(prompt, 4)
        scene.stored()
        scene.empty(engine)
        engine.reset_hooks()
        engine.arm(hook, when, [(scene.daemon.pid, signal.SIGKILL, after_s)])
        asked = scene.words(len(prompt), ("other", name)) if name == "store" else prompt
        answer = engine.one(asked, 4)
        longest_ms = 1000 * engine.hooks().longest
        scene.daemon.wait()
        scene.daemon.start()
        if name == "store":
            scene.empty(engine)
            expected = engine.one(asked, 4)
        note(**{f"right_{name}": answer.tokens == expected.tokens})
        note(**{f"longest_hook_ms_{name}": longest_ms, f"back_s_{name}": _back(scene, engine)})
    _kill_engine(scene, note, engine)


def _back(scene: Scene, engine: EngineProcess) -> float:
    """Seconds until what is stored is found again."""
    began_s, number = time.monotonic(), 0
    while time.monotonic() < began_s + PATIENCE_S:
        prompt = scene.words(300, ("back", began_s, number))
        number += 1
        engine.one(prompt, 1)
        if scene.hit(engine, prompt, 1).external:
            return time.monotonic() - began_s
        time.sleep(0.05)
    raise Unavailable("no hit came back after the daemon was started again")


def _kill_engine(scene: Scene, note: Note, engine: EngineProcess) -> None:
    """That of the stage before, amid stores."""
    victim = scene.engines("kvass", "sampled")["sampled"]
    prompts = [Prompt(scene.words(scene.sizes.usual, ("victim", n)), 1) for n in range(STORES)]
    apart_from_kvass = [msgspec.structs.replace(one, params=NOTHING) for one in prompts]
    expected = engine.generate(*apart_from_kvass)
    scene.empty(engine)
    victim.verify_again()
    victim.arm("wait_for_save", "after", [(victim.pid, signal.SIGKILL, 0.0)])
    with suppress(EngineDied):
        victim.generate(*prompts)
    scene.kill("sampled")
    began_s = time.monotonic()
    scene.daemon.wait_until(PATIENCE_S, **OWED)
    note(engine_freed_s=time.monotonic() - began_s)
    pairs = zip(engine.generate(*prompts), expected, strict=True)
    note(engine_equal=sum(one.tokens == other.tokens for one, other in pairs))
