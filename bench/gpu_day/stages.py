"""The stages of a GPU day, in the order of their worth."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from bench.gpu_day.scene import Scene

Note = Callable[..., None]
"""Puts figures, by their names, into the day's file."""


class Stage(NamedTuple):
    """``letter``: of the list in ``--help``. ``minutes``: it is cut after so many. ``runs``: the
    function, as module:name, of a ``Scene`` and a ``Note``. ``writes``: its figures, in short.
    ``needs``: packages. ``runner``: vLLM's model runner, by ``VLLM_USE_V2_MODEL_RUNNER``."""

    name: str
    letter: str
    subject: str
    minutes: float
    runs: str
    writes: str
    needs: tuple[str, ...] = ("torch", "vllm")
    runner: str = "1"

    def run(self, scene: Scene, note: Note) -> None:
        """All of it."""
        module, _, name = self.runs.partition(":")
        function: Callable[[Any, Note], None] = getattr(import_module(module), name)
        function(scene, note)


HITS: Final = "bench.gpu_day.hits:"
CHECKS: Final = "bench.gpu_day.checks:"
OTHERS: Final = "bench.gpu_day.others:"
TESTS: Final = OTHERS + "tests"
TIMES: Final = "ms to the first token, tokens found"
STAGES: Final = (
    Stage("tests", "-", "pytest tests/gpu", 4, TESTS, "passed, failed, names", ("torch", "pytest")),
    Stage("copies", "a", "copies of each geometry", 2, OTHERS + "copies", "ratios", ("torch",)),
    Stage("short", "a", "short pieces through stages", 2, OTHERS + "short", "ratios", ("torch",)),
    Stage("gil", "b", "loads in pieces, engine busy", 1, OTHERS + "gil", "ratios", ("torch",)),
    Stage("hits", "b", "hits, idle and 16 at once", 5, HITS + "hits", TIMES),
    Stage("in_step", "b", "small hits inside the step", 2, HITS + "in_step", "ms, steps"),
    Stage("staged", "a", "stages in an engine", 3, HITS + "staged", "ms, ms per token"),
    Stage("twins", "c", "which side differs from itself", 3, CHECKS + "twins", "differences"),
    Stage("shadow", "d", "shadow mode, flipped bytes", 2, CHECKS + "shadow", "rows, jobs"),
    Stage("kills", "e", "daemon and engine are killed", 1.5, CHECKS + "kills", "tokens, seconds"),
    Stage("decode", "f", "decode beside stores", 1.5, HITS + "decode", "ms per token"),
    Stage(
        "transformers", "g", "transformers", 1, OTHERS + "hugging_face", TIMES, ("transformers",)
    ),
    Stage("sglang", "g", "SGLang", 3, OTHERS + "sglang", TIMES, ("torch",)),
    Stage("two", "h", "two engines at once", 2, HITS + "two", "ms alone and at once"),
    Stage("hits_v1", "b", "hits, runner V1", 5, HITS + "hits", TIMES, runner="0"),
    Stage("tests_v1", "-", "tests, runner V1", 4, TESTS, "as tests", runner="0"),
)


def table(stages: tuple[Stage, ...] = STAGES) -> str:
    """For ``--help``."""
    lines = [
        f"  {one.name:<13} {one.letter:<2} {one.minutes:>4g} min  {one.subject:<31} {one.writes}"
        for one in stages
    ]
    return "\n".join(["stages:", *lines])
