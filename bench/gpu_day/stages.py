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
    """``letter``: of the list in ``--help``. ``seconds``: what it may take, with the start of its
    engines: if less is left it does not begin, and after twice as many it is cut. ``runs``: the
    function, as module:name, of a ``Scene`` and a ``Note``. ``writes``: its figures, in short.
    ``needs``: packages. ``runner``: vLLM's model runner, by ``VLLM_USE_V2_MODEL_RUNNER``."""

    name: str
    letter: str
    subject: str
    seconds: float
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
TESTS: Final = OTHERS + "engine_tests"
TIMES: Final = "ms to the first token, tokens found"
COUNTS: Final = "passed, failed, names"
CARD: Final = ("torch",)
PYTEST: Final = ("torch", "vllm", "pytest")
STAGES: Final = (
    Stage("tests", "-", "tests/gpu without engines", 60, OTHERS + "tests", COUNTS, PYTEST[::2]),
    Stage("copies", "a", "copies of each geometry", 60, OTHERS + "copies", "ratios", CARD),
    Stage("short", "a", "short pieces through stages", 60, OTHERS + "short", "ratios", CARD),
    Stage("gil", "b", "loads in pieces, engine busy", 30, OTHERS + "gil", "ratios", CARD),
    Stage("hits", "b", "hits, idle and 16 at once", 220, HITS + "hits", TIMES),
    Stage("decode", "f", "decode beside stores", 60, HITS + "decode", "ms per token"),
    Stage("in_step", "b", "small hits inside the step", 130, HITS + "in_step", "ms, steps"),
    Stage("staged", "a", "stages in an engine", 170, HITS + "staged", "ms, ms per token"),
    Stage("shadow", "d", "shadow mode, flipped bytes", 75, CHECKS + "shadow", "rows, jobs"),
    Stage("kills", "e", "daemon and engine are killed", 80, CHECKS + "kills", "tokens, seconds"),
    Stage("twins", "c", "which side differs from itself", 120, CHECKS + "twins", "differences"),
    Stage("two", "h", "two engines at once", 70, HITS + "two", "ms alone and at once"),
    Stage(
        "transformers", "g", "transformers", 30, OTHERS + "hugging_face", TIMES, ("transformers",)
    ),
    Stage("engines", "-", "tests/gpu of engines", 240, TESTS, COUNTS, PYTEST),
    Stage("hits_v1", "b", "hits, runner V1", 220, HITS + "hits", TIMES, runner="0"),
    Stage("engines_v1", "-", "engines, runner V1", 240, TESTS, COUNTS, PYTEST, "0"),
    Stage("sglang", "g", "SGLang", 120, OTHERS + "sglang", TIMES, CARD),
)
"""By worth, and beside what has the same engines: a start takes most of a minute. Seconds are
reckoned, not seen: correct them by the page of a day."""

SIZED: Final[dict[str, tuple[str, ...]]] = {
    OTHERS + "tests": (),
    OTHERS + "copies": ("tokens",),
    OTHERS + "short": ("tokens",),
    OTHERS + "gil": (),
    TESTS: (),
}
"""By what a stage runs: the fields of ``Sizes`` that its figures depend on, of those that differ
between days. Where it is not listed: all."""


def table(stages: tuple[Stage, ...] = STAGES) -> str:
    """For ``--help``."""
    lines = [
        f"  {one.name:<13} {one.letter:<2} {one.seconds:>4g} s  {one.subject:<31} {one.writes}"
        for one in stages
    ]
    return "\n".join(["stages:", *lines])
