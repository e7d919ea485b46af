"""``make bench-peers``: the page says what was measured, and a side that fails stops no other.

LMCache is not installed here: that is the side that fails."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.engine import words
from bench.peers import __main__ as command
from bench.peers import engineless, engines, report
from bench.peers.engineless import Plan
from bench.peers.engines import SHORT, Engines, Sizes
from bench.peers.host_streams import Event, Stream, copy_runs, joined, on_stream
from bench.peers.results import Results, Row, in_turns
from kvass.errors import Unavailable
from tests.support.vllm.process import Answer, EngineDied, Prompt

# ---------------------------------------------------------------- the page


def row(part: str = "engine", *, more: bool = False, **samples: list[float]) -> Row:
    return Row(part, "document", "a document again", "s", more, samples=samples)


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (row(kvass=[1.0, 1.1], lmcache=[3.0, 3.3]), ("**kvass** 3x", True)),
        (row(kvass=[1.0, 1.1], lmcache=[3.0, 3.3], more=True), ("LMCache 3x", False)),
        (row(kvass=[3.0, 3.3], lmcache=[1.0, 1.1]), ("LMCache 3x", False)),
        (row(kvass=[1.0], lmcache=[3.0], lmcache_1=[0.5]), ("LMCache 2x", False)),
        (row(kvass=[2.0], lmcache=[3.0], offloading=[1.0]), ("vLLM offloading 2x", False)),
        (row(kvass=[2.0], lmcache=[3.0], offloading=[4.0]), ("**kvass** 1.5x", True)),
        (row(kvass=[2.0], offloading=[4.0]), ("**kvass** 2x", True)),
        (row(kvass=[0.0], lmcache=[1.0]), ("**kvass**", True)),
        (row(kvass=[1.0, 2.0], lmcache=[1.9, 4.0]), ("no clear lead", False)),
        (row(kvass=[1.0, 9.0, 1.0, 1.0, 1.0], lmcache=[2.0] * 4), ("**kvass** 2x", True)),
        (row(kvass=[100.0], lmcache=[101.0]), ("no clear lead", False)),
        (row(kvass=[1.0]), ("", True)),
        (row(lmcache=[1.0]), ("no figure of kvass", False)),
        (row("new", kvass=[0.4, 0.9], again=[-2.0, 2.0]), ("goal met", True)),
        (row("new", kvass=[3.0], again=[-2.0, 1.0]), ("goal missed (noise: 2.0 %)", False)),
    ],
)
def test_a_lead_is_outside_of_the_spread(what: Row, found: tuple[str, bool]) -> None:
    assert report.verdict(what) == found


def test_whom_nobody_waited_for_longer_does_not_lead() -> None:
    one = row(kvass=[0.1])
    one.trouble["lmcache"] = "not within 20 s"
    assert report.verdict(one) == ("**kvass**", True)


def test_the_page_has_each_row_and_each_reason(tmp_path: Path) -> None:
    results = Results({"Cores": "2"}, {"LMCache": "0.5.6"}, 9, "today", minutes=41.6, repetitions=2)
    first = results.row("engine", "document", "a document again", "s")
    first.samples = {"none": [12.0], "kvass": [2.0, 4.0, 3.0], "lmcache": [1.0, 1.0, 1.0]}
    first.trouble = {"offloading": "only on | GPUs"}
    long = "failed: Exception: only on | GPUs of other makers, and only there"
    results.row("new", "new_first", "a new document", "%").trouble = {"offloading": long}
    path = tmp_path / "run.json"
    results.save(path)
    assert command.main(["--render", str(path), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert (
        "| a document again | s | 12 | 1 (1 to 1) | 3 (2 to 4) | only on / GPUs | LMCache 3x |"
        in page
    )
    assert f"- a document again (LMCache 3x): {report.WHY['document']}." in page
    assert "REPETITIONS=2` wrote this page: today, 42 minutes, 9 rounds" in page
    assert "- Cores: 2\n- LMCache: 0.5.6" in page
    assert "| a new document | % | see below | no figure of kvass |  |\n\n- vLLM off" in page
    assert f"- vLLM offloading: {long.replace('|', '/')}" in page
    assert page.count("Not measured.") == 6  # every other part's table
    assert "{" not in page
    web = (tmp_path / "benchmarks.html").read_text()
    assert "<td>3 (2 to 4)</td>" in web
    assert "http" not in web
    assert "](" not in web


def test_what_was_compared_with_nobody_is_no_lead() -> None:
    results = Results({}, {}, 9, "today", [row(kvass=[1.0])])
    assert "\n\nIn no row that both were measured in.\n\n" in report.markdown(results)


@pytest.mark.parametrize("name", engines.WORKLOADS)
def test_tokens_that_were_found_have_a_reason_of_their_own(name: str) -> None:
    rows = engines.hit_rows(Results({}, {}, 9, ""), name, Sizes())
    for one, found in zip(rows, (1.0, 5984.0), strict=True):
        one.samples = {"kvass": [found], "lmcache": [found]}
    first, second = report.behind(rows)
    assert first == f"- {rows[0].what} (no clear lead): {report.WHY[name]}."
    assert second == (
        f"- {rows[1].what} (no clear lead): kvass and vLLM's offloading find all whole blocks, and "
        "nothing can find more."
    )


def test_an_unknown_part_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "copies,nothing", "--out", str(tmp_path)]) == 2
    assert "--only nothing: the parts are copies, lookups," in capsys.readouterr().err


# ---------------------------------------------------------------- without an engine


def test_kvass_is_measured_though_its_peer_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engineless, "LARGE_L1_BYTES", 256 << 20)
    monkeypatch.setattr(engineless, "SMALL_L1_BYTES", 64 << 20)
    monkeypatch.setattr(engineless, "TOKENS", 512)
    monkeypatch.setattr(engineless, "LOOKUPS", (512, 1024))
    monkeypatch.setattr(engineless, "IDLE_S", 0.1)
    monkeypatch.setattr(engineless, "TIDY_S", 0.0)
    results = Results({}, {}, 1, "")
    plan = Plan(sys.executable, tmp_path, tmp_path, 1)
    for part in ("copies", "lookups", "requests", "kills"):
        engineless.PARTS[part](results, plan)
    for one in results.rows:
        assert one.samples["kvass"], one
        assert min(one.samples["kvass"]) >= 0
        assert "No module named" in one.trouble["lmcache"], one
        assert "kvass" not in one.trouble


def test_the_page_says_how_much_is_written_to_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engineless, "TOKENS", 512)
    monkeypatch.setattr(engineless, "PROMPT_BYTES", 64 << 20)
    monkeypatch.setattr(engineless, "in_turns", lambda *_: [(0, "kvass"), (0, "raw")])
    results = Results({}, {}, 1, "")
    engineless.measure_disk(results, Plan(sys.executable, tmp_path, tmp_path, 1))
    write, synced, read, restart = results.rows
    assert write.what == "store 128 MiB until the disk tier has written it"
    assert [{*one.samples} for one in (write, restart)] == [{"kvass"}] * 2
    assert [{*one.samples} for one in (synced, read)] == [{"kvass", "raw"}] * 2
    assert synced.samples["kvass"] < write.samples["kvass"]


def test_turns_begin_with_another_and_leave_out_who_failed() -> None:
    failed = Row("", "", "", "", False, trouble={"b": "gone"})
    assert list(in_turns("abc", 2, failed)) == [(0, "a"), (0, "c"), (1, "c"), (1, "a")]


# ---------------------------------------------------------------- vLLM's offloading without a GPU


def test_runs_that_follow_each_other_on_both_sides_are_one_copy() -> None:
    sources = np.array([0, 8, 16, 24, 40])
    targets = np.array([100, 108, 200, 208, 216])
    sizes = np.array([8, 8, 8, 8, 4])
    assert [*joined(sources, targets, sizes)] == [[0, 16, 40], [100, 200, 216], [16, 16, 4]]
    assert [*joined(sources[:1], targets[:1], sizes[:1])] == [[0], [100], [8]]


def test_a_stream_copies_in_order_and_after_the_event_that_it_waits_for() -> None:
    memory = torch.zeros(3, 8, dtype=torch.uint8)
    memory[0] = 7
    at = [torch.tensor([row.data_ptr()]) for row in memory]
    gate, size = threading.Event(), torch.tensor([8])
    one, other = Stream(), Stream()
    copied, end = Event(enable_timing=True), Event(enable_timing=True)
    one.do(gate.wait, 60.0)
    with on_stream(one):
        copy_runs(at[0], at[1], size)
    copied.record(one)
    other.wait_event(copied)
    with on_stream(other):
        copy_runs(at[1], at[2], size)
    end.record(other)
    assert not memory[1:].any(), "both wait"
    assert not end.query()
    gate.set()
    end.synchronize()
    assert memory.eq(7).all()
    assert copied.elapsed_time(end) >= 0


# ---------------------------------------------------------------- with stand-ins for engines


class Engine:
    """A token takes a millisecond, times ``slow``, unless one of two caches has it: its own, which
    ``reset`` empties, and another, if it is ``cached``."""

    def __init__(self, cached: bool = False, slow: float = 1.0) -> None:
        self.slow, self.cached = slow, cached
        self.own: list[list[int]] = []
        self.other: list[list[int]] = []

    def reset(self) -> bool:
        self.own.clear()
        return True

    def generate(self, *prompts: Prompt, timeout_s: float) -> list[Answer]:
        return [self.answer(prompt) for prompt in prompts]

    def answer(self, prompt: Prompt) -> Answer:
        local, external = found(self.own, prompt.tokens), found(self.other, prompt.tokens)
        external = max(0, external - local)
        self.own.append(prompt.tokens)
        if self.cached:
            self.other.append(prompt.tokens)
        first_s = self.slow * 1e-3 * (len(prompt.tokens) - local - external)
        tokens = list(range(prompt.max_tokens))
        hooks_s = first_s - first_s / self.slow
        total_s = first_s + 1e-3 * len(tokens)
        return Answer(tokens, [], local, external, first_s, total_s, hooks_s=hooks_s)


class Broken(Engine):
    def generate(self, *prompts: Prompt, timeout_s: float) -> list[Answer]:
        raise EngineDied("engine process 7 ended; the end of its log:\nmore")


def found(cache: list[list[int]], tokens: list[int]) -> int:
    def alike(one: list[int]) -> int:
        pairs = zip(one, tokens[:-1], strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(tokens) - 1))

    return max(map(alike, cache), default=0)


def some(**found: Any) -> Engines:
    return Engines(found, 0)


@pytest.mark.parametrize("name", engines.WORKLOADS)
def test_a_workload_hits_what_it_says(name: str) -> None:
    results = Results({}, {}, 3, "")
    rows = engines.hit_rows(results, name, SHORT)
    three = some(none=Engine(), kvass=Engine(cached=True), lmcache=Broken())
    engines.WORKLOADS[name][1](three, SHORT, 3, *rows)
    wait, hits = (one.samples for one in rows)
    assert min(hits["kvass"]) > 0
    assert set(hits["none"]) == {0}
    assert wait["kvass"] == pytest.approx(wait["local"]), "no cache is better than one's own"
    assert max(wait["kvass"]) < min(wait["none"])
    assert [one.trouble for one in rows] == [{"lmcache": "ended"}] * 2
    assert name == "document" or max(wait["kvass"]) > 0.05  # what is new is computed


def test_a_cache_that_finds_nothing_has_no_figure() -> None:
    rows = engines.hit_rows(Results({}, {}, 3, ""), "rag", SHORT)
    engines.measure_rag(some(kvass=Engine(cached=False)), SHORT, 3, *rows)
    assert rows[0].trouble == {"kvass": "nothing was found"}


def test_what_new_prompts_cost_is_relative_to_none() -> None:
    rows = engines.new_rows(Results({}, {}, 3, ""))[: -len(engines.SWITCHED)]
    engines.measure_new(some(none=Engine(), again=Engine(), kvass=Engine(slow=1.5)), 3, *rows)
    first, first_hooks, crowd, crowd_hooks = (one.samples for one in rows)
    assert first_hooks["kvass"] == pytest.approx([100 / 3] * 6)
    assert min(crowd_hooks["kvass"]) > 30
    assert "again" not in first_hooks
    assert first["again"] == pytest.approx([0.0] * 6)
    assert crowd["again"] == pytest.approx([0.0] * 3)
    assert first["kvass"] == pytest.approx([50.0] * 6)
    assert 40 < crowd["kvass"][0] < 50
    assert "none" not in first
    assert words(3, "x") != words(3, "y")


class Switch:
    """An engine with a switch: with kvass a prompt takes ``on`` seconds, without it one."""

    def __init__(self, on: float, broken: bool = False) -> None:
        self.on, self.broken = on, broken
        self.turns: list[bool] = []

    def generate(self, *prompts: Prompt) -> list[Answer]:
        (off,) = {prompt.params is not None for prompt in prompts}
        self.turns.append(off)
        each_s, hooks_s = 1.0 if off else self.on, 1.0 if self.broken or not off else 0.1
        ends = range(1, len(prompts) + 1)
        return [Answer([], [], 0, 0, 0.0, end * each_s, hooks_s=hooks_s) for end in ends]


@pytest.mark.parametrize("shape", engines.SWITCHED)
def test_kvass_on_is_compared_with_off_in_one_engine(shape: tuple[int, int, int]) -> None:
    engine: Any = Switch(1.25)
    engines.measure_switched(engine, 3, shape, one := row("new"))
    assert one.samples["kvass"] == pytest.approx([25.0] * 3)
    assert engine.turns == [True, False, False, True, True, False]
    with pytest.raises(Unavailable, match="not off"):
        engines.measure_switched(Switch(1.25, broken=True), 1, shape, one)  # type: ignore[arg-type]
