"""``python -m bench.short_hits`` compares what it says. Engines are made here, with given times;
``tests/engine/test_benchmarks.py`` starts a real one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench import short_hits, short_hits_table, slow_copies
from bench.short_hits import BESIDE, NEW, Bench, Spread
from kvass.errors import Unavailable
from tests.support.vllm.child import ChildEngine
from tests.support.vllm.process import Answer, Prompt

SIZES = (32, 64, 512)


class FakeEngine:
    """One with a prefix cache of its own and with kvass. ``computed_s``: of a token; a hit from
    kvass takes ``load_s``. ``keeps``: its own cache is not emptied; ``forgets``: kvass finds
    nothing."""

    def __init__(
        self,
        computed_s: float = 0.001,
        load_s: float = 0.05,
        *,
        keeps: bool = False,
        forgets: bool = False,
    ) -> None:
        self._computed_s, self._load_s = computed_s, load_s
        self._keeps, self._forgets = keeps, forgets
        self._own: set[tuple[int, ...]] = set()
        self._kvass: set[tuple[int, ...]] = set()
        self.asked: Counter[str] = Counter()
        self.lookups: list[dict[str, Any]] = []

    def reset(self) -> bool:
        if not self._keeps:
            self._own.clear()
        return True

    def one(self, tokens: list[int], max_tokens: int, **fields: Any) -> Answer:
        return self.generate(Prompt(tokens, max_tokens, **fields))[0]

    def generate(self, *prompts: Prompt) -> list[Answer]:
        assert all(one.params == prompts[0].params for one in prompts), "they run together"
        assert len(prompts) in (1, 4)
        return [self._answer(one) for one in prompts]

    def _answer(self, prompt: Prompt) -> Answer:
        seen, on = tuple(prompt.tokens[:-NEW]), prompt.params is None
        local = len(seen) * (seen in self._own)
        external = len(seen) * (on and not local and seen in self._kvass)
        took_s = self._computed_s * (len(prompt.tokens) - local - external)
        took_s += self._load_s * bool(external)
        self._own.add(tuple(prompt.tokens))
        if on and not self._forgets:
            self._kvass.add(tuple(prompt.tokens))
        if on:
            why, name = "" if external else "absent", f"r{len(self.lookups)}"
            fields = {"request": name, "prompt_tokens": len(prompt.tokens), "why": why}
            self.lookups.append(fields)
        return Answer([], [], local, external, took_s, took_s, first_token_steps=1 + bool(external))


def measured(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, rounds: int = 4) -> Any:
    class Client:
        def __init__(self, _: str) -> None: ...
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None: ...
        def status(self, _: float) -> dict[str, Any]:
            return {"reservations": 0}

        def explain(self, **_: Any) -> list[dict[str, Any]]:
            return engine.lookups[-256:]

    monkeypatch.setattr(short_hits, "Client", Client)
    bench = Bench(engine, "", SIZES)  # type: ignore[arg-type]
    for number in range(-1, rounds):
        bench.round(number, counts=number >= 0)
    return bench.figures()


def test_a_hit_that_takes_longer_than_computing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = measured(monkeypatch, FakeEngine())
    for name in BESIDE:
        one = figures[name]
        assert one["32"]["kvass_vs_computed"] == pytest.approx((66 / 48,) * 3)
        assert one["512"]["kvass_vs_own"] == pytest.approx((66 / 16,) * 3)
        assert one["worst"] == pytest.approx(66 / 48)
        assert (one["worst_by_chance"], one["slower_at"]) == (1.0, [32])
        assert one["64"]["steps"] == {"kvass": 2, "computed": 1, "own": 1, "again": 1}
        assert (one["64"]["loaded"], one["64"]["ended_by"]) == (1.0, {"the prompt": 4})
    assert "idle: at worst 1.38 (1.00 by chance); slower than computing at 32" in (
        text := short_hits.markdown(figures)
    )
    assert "| 512 | 66.00 (66.00 to 66.00) | 528.00 (528.00 to 528.00) |" in text
    figures |= {"document_kvass_vs_own": Spread(1, 2, 3), "cost_percent": {"1 x 64 + 2": (0, 1, 2)}}
    assert "| vLLM's own, idle | 1.10 | 4.12" in short_hits_table.markdown(figures).replace(
        "a hit of 512 tokens against ", ""
    )


def test_what_is_computed_instead_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    one = measured(monkeypatch, FakeEngine(forgets=True))["decoding"]["64"]
    assert (one["loaded"], one["ended_by"]) == (0.0, {"absent": 4})
    assert one["kvass_vs_computed"] == (1.0, 1.0, 1.0)


def test_a_hit_in_the_engines_own_cache_is_not_taken_for_one_of_kvass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(Unavailable, match="kvass: 32 and 0 tokens hit, not 0"):
        measured(monkeypatch, FakeEngine(keeps=True))


def test_a_slow_copy_takes_so_many_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, loaded = [0.0], list[float](), list[Any]()

    def load(*of: Any) -> None:
        loaded.append(of)
        now[0] += 0.25

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(slow_copies, "time", clock)
    slow_copies.slowed(load, 20)(*(row := (object(), object(), object())))  # type: ignore[arg-type]
    assert (loaded, slept) == ([row], [0.25 * 19])


def test_a_prompt_joins_those_that_generate_already() -> None:
    """``Prompt.joins``, which the bench asks with; and a prompt that has ended keeps none out."""
    log = list[str]()

    class Engine(ChildEngine):
        def __init__(self) -> None:
            self.running: dict[str, list[int]] = {}
            self.hooks_clock: Any = SimpleNamespace(seconds=0.0)

        def _add(self, prompt: Prompt) -> tuple[str, str]:
            log.append(f"add {prompt.tokens[0]}")
            self.running[name := f"r{prompt.tokens[0]}"] = [0, prompt.max_tokens]
            return name, name

        def step(self) -> list[Any]:
            log.append("step")
            for one in self.running.values():
                one[0] += 1
            outputs = [
                SimpleNamespace(
                    request_id=name,
                    finished=made == most,
                    outputs=[SimpleNamespace(token_ids=[0] * made)],
                )
                for name, (made, most) in self.running.items()
            ]
            self.running = {n: one for n, one in self.running.items() if one[0] < one[1]}
            return outputs

        def drain(self) -> None: ...

        def _answer(self, name: str, internal: str, first: Any, done: Any) -> Any:
            return name, len(done[name][0].token_ids), first[name][1]

    prompts = [Prompt([1], 5), Prompt([2], 2), Prompt([3], 1, joins=3), Prompt([4], 1, joins=9)]
    answers: Any = Engine().generate(prompts)
    assert answers == [("r1", 5, 1), ("r2", 2, 1), ("r3", 1, 1), ("r4", 1, 1)]
    steps = "add 1, add 2, step, step, step, add 3, step, step, add 4, step"
    assert log == steps.split(", ")
