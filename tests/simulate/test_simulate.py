"""``kvass simulate``: traces are read whole, the core plays them as a plain LRU would, and no
policy beats the optimal one."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import combinations, product, takewhile
from pathlib import Path
from random import Random
from threading import Thread
from typing import get_args

import numpy as np
import pytest

from kvass.cli.main import main
from kvass.core.pending.tier_state import FlushMode
from kvass.errors import UsageError
from kvass.layout.windows import default_interval
from kvass.simulate.models import MODELS, Layers, layout, token_bytes
from kvass.simulate.optimal import Best, optimal_hits
from kvass.simulate.player import Model, Outcome, Player, Setting
from kvass.simulate.report import Result, advice
from kvass.simulate.traces import MOONCAKE_TOKENS, MOST_WRONG, Trace, TraceRequest, read
from kvass.types import Size

CHUNK = MOONCAKE_TOKENS
MODEL = Model(CHUNK, layout((Layers(1, 8),), CHUNK))
ROW = MODEL.row_bytes


def trace_of(prompts: Sequence[Sequence[int]], every_s: float = 1.0) -> Trace:
    requests = [
        TraceRequest(i * every_s, len(ids) * CHUNK, 1, np.array(ids, np.uint64))
        for i, ids in enumerate(prompts)
    ]
    return Trace("made up", CHUNK, requests)


def random_prompts(seed: int, count: int = 60) -> list[list[int]]:
    """Branches of a few trees: what comes after a chunk depends on it."""
    random, ids, prompts = Random(seed), dict[tuple[int, ...], int](), []
    for _ in range(count):
        path: tuple[int, ...] = (random.randrange(4),)
        prompt = []
        for _ in range(random.randint(1, 6)):
            prompt.append(ids.setdefault(path, len(ids)))
            path += (random.randrange(2),)
        prompts.append(prompt)
    return prompts


def play(trace: Trace, setting: Setting) -> Outcome:
    *_, outcome = Player(setting, {0: MODEL}).play(trace)
    return outcome


def lru(prompts: Sequence[Sequence[int]], rows: int) -> Iterator[int]:
    """Chunks hit by each prompt, with LRU by whole prompts, the deepest chunk of each first."""
    held: list[int] = []  # the least recently used first
    for prompt in prompts:
        hit = 0
        while hit < len(prompt) and prompt[hit] in held:
            hit += 1
        yield hit
        held = [c for c in held if c not in prompt]
        held = [*held[max(0, len(held) + len(prompt) - rows) :], *reversed(prompt)]


@pytest.mark.parametrize("seed", range(6))
def test_the_core_plays_a_trace_as_lru_does(seed: int) -> None:
    prompts = random_prompts(seed)
    rows = 24
    outcome = play(trace_of(prompts), Setting(rows * ROW, CHUNK))
    assert outcome.hits == [hit * CHUNK for hit in lru(prompts, rows)]
    assert outcome.evicted_rows == outcome.stored_rows - rows


def test_what_evicts_nothing_hits_all_that_repeats() -> None:
    prompts = random_prompts(7)
    outcome = play(trace_of(prompts), Setting(4096 * ROW, CHUNK))
    assert outcome.hit_tokens == sum(optimal_hits(prompts, 1 << 40)) * CHUNK > 0
    assert outcome.evicted_rows == 0


def test_smaller_chunks_than_the_trace_tells_hit_as_much() -> None:
    prompts = random_prompts(8)
    half = Model(CHUNK // 2, layout((Layers(1, 16),), CHUNK // 2))
    *_, outcome = Player(Setting(4096 * ROW, CHUNK // 2), {0: half}).play(trace_of(prompts))
    assert outcome.hit_tokens == sum(optimal_hits(prompts, 1 << 40)) * CHUNK


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_no_choice_of_what_to_keep_beats_the_optimal_one(rows: int) -> None:
    for seed in range(20):
        prompts = random_prompts(seed, 5)
        assert sum(optimal_hits(prompts, rows)) == best_of_all(prompts, rows), (seed, rows)


def best_of_all(prompts: Sequence[Sequence[int]], rows: int) -> int:
    """By trying everything: any ``rows`` chunks of those held and those just used may be kept."""
    best = {frozenset[int](): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            hit = 0
            while hit < len(prompt) and prompt[hit] in held:
                hit += 1
            there = held | set(prompt)
            for kept in combinations(sorted(there), min(rows, len(there))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), hits + hit)
        best = after
    return max(best.values())


def test_a_tier_gives_what_l1_evicted_and_takes_time_for_it() -> None:
    prompts = random_prompts(9)
    outcome = play(trace_of(prompts), Setting(24 * ROW, CHUNK, 4096 * ROW, ROW * 10.0))
    assert outcome.hit_tokens == sum(optimal_hits(prompts, 1 << 40)) * CHUNK
    assert outcome.from_l2_tokens > 0
    assert outcome.waited_s >= outcome.from_l2_tokens / CHUNK / 10
    alone = play(trace_of(prompts), Setting(24 * ROW, CHUNK))
    assert alone.hit_tokens < outcome.hit_tokens


def test_a_tier_that_is_slower_than_the_engine_is_not_loaded_from() -> None:
    """Always loading makes requests wait longer than computing takes; where loads are fast both
    settings give the same."""
    trace = trace_of(random_prompts(9), every_s=100.0)

    def with_speed(rows_s: float, skip: bool) -> Result:
        setting = Setting(24 * ROW, CHUNK, 4096 * ROW, rows_s * ROW, 10.0 * CHUNK)
        return Result(trace, play(trace, replace(setting, skip_slow_loads=skip)), 1.0, 1.0)

    skips, loads = with_speed(3.0, True), with_speed(3.0, False)
    assert skips.outcome.not_worth_it > 0 == loads.outcome.not_worth_it
    assert skips.outcome.waited_s < loads.outcome.waited_s
    assert skips.saved_s > loads.saved_s
    assert with_speed(30.0, True).outcome.hits == with_speed(30.0, False).outcome.hits


def test_a_request_waits_no_longer_than_computing_takes() -> None:
    """Nor does it in the engine, with a tier that never comes to an end."""
    prompts = [[1, 2, 3], *([n] for n in range(10, 40)), [1, 2, 3]]
    setting = Setting(24 * ROW, CHUNK, 4096 * ROW, ROW / 1000, CHUNK * 2.0, skip_slow_loads=False)
    assert 1.5 < play(trace_of(prompts, 1e5), setting).waited_s < 1.51  # 30 probes, too


def test_when_rows_go_to_the_tier_is_a_setting() -> None:
    trace = trace_of(random_prompts(9))
    through, lazy, none = (
        play(trace, Setting(24 * ROW, CHUNK, 4096 * ROW, ROW * 1e3, flush=mode))
        for mode in get_args(FlushMode)
    )
    assert through.hit_tokens == lazy.hit_tokens > none.hit_tokens
    assert through.l2_stored_bytes > lazy.l2_stored_bytes > 0 == none.l2_stored_bytes
    small = Setting(24 * ROW, CHUNK, 4096 * ROW, ROW * 1e3)
    kept = play(trace, small)
    assert play(trace, replace(small, keep_loaded=False)).from_l2_tokens != kept.from_l2_tokens


# ---------------------------------------------------------------- tails

BLOCK = 16
BLOCKS = Model(4 * BLOCK, layout((Layers(1, 8),), BLOCK))


def block_trace(seed: int) -> tuple[Trace, list[list[int]]]:
    """Prompts whose last block is not whole, and the ids of their blocks."""
    random, prompts = Random(seed), [[0]]
    for i in range(80):
        begin = random.choice(prompts)
        new = [(i + 1) * 100 + k for k in range(random.randrange(1, 12))]
        prompts.append(begin[: random.randint(0, len(begin))] + new)
    return Trace(
        "blocks",
        BLOCK,
        [
            TraceRequest(i * 1.0, len(p) * BLOCK + i % BLOCK, 1, np.array(p, np.uint64))
            for i, p in enumerate(prompts)
        ],
    ), prompts


def alike(a: list[int], b: list[int]) -> int:
    """Of how many blocks both begin."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])


@pytest.mark.parametrize("seed", range(3))
def test_with_tails_hits_end_where_prompts_part(seed: int) -> None:
    trace, prompts = block_trace(seed)
    expected = []
    for i, (request, prompt) in enumerate(zip(trace.requests, prompts, strict=True)):
        shared = [alike(prompt, before) for before in prompts[:i]]
        expected.append(min(max(shared, default=0), (request.input_tokens - 1) // BLOCK) * BLOCK)
    setting = Setting(1 << 24, BLOCKS.chunk_tokens, tails=True)
    *_, outcome = Player(setting, {0: BLOCKS}).play(trace)
    assert outcome.hits == expected
    assert Best(trace, {0: BLOCKS}, tails=True).rate(1 << 60) == pytest.approx(outcome.hit_rate)
    *_, whole = Player(replace(setting, tails=False), {0: BLOCKS}).play(trace)
    assert whole.hit_tokens < outcome.hit_tokens, "negative control"
    assert whole.tail_tokens == 0 < outcome.tail_tokens < outcome.stored_tokens


@pytest.mark.parametrize("rows", [8, 24])
def test_no_policy_beats_the_optimal_one_with_tails(rows: int) -> None:
    trace, _ = block_trace(4)
    *_, outcome = Player(
        Setting(rows * BLOCKS.row_bytes, BLOCKS.chunk_tokens, tails=True), {0: BLOCKS}
    ).play(trace)
    best = Best(trace, {0: BLOCKS}, tails=True).rate(rows * BLOCKS.row_bytes)
    assert 0 < outcome.hit_rate <= best
    assert outcome.evicted_rows > 0


def test_the_end_of_a_prompt_hits_if_the_trace_names_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([line(), line(), line(hash_ids=[4, 9])]))
    model = Model(256, layout((Layers(1, 8),), BLOCK))
    *_, outcome = Player(Setting(1 << 24, 256, tails=True), {0: model}).play(read(file))
    assert outcome.hits == [0, 1088, 1024]  # of 1,100 tokens


def test_a_prompt_with_tails_may_be_longer_than_one_item() -> None:
    trace = trace_of([range(1100)] * 2)
    model = Model(32, layout((Layers(1, 8),), BLOCK))
    *_, outcome = Player(Setting(1 << 28, 32, tails=True), {0: model}).play(trace)
    assert outcome.hits == [0, 1100 * CHUNK - 16]


@pytest.mark.parametrize("model", MODELS)
def test_each_model_plays(model: str) -> None:
    played = Model(256, layout(MODELS[model], 16))
    trace = trace_of([[1, 2], [1, 2], [1, 3], [1, 4]])
    windows = any(0 < group.window_tokens <= 256 for group in played.groups)  # not all are needed
    for interval, third in ((0, CHUNK), (None, 0 if windows else CHUNK)):
        setting = Setting(64 * played.row_bytes, 256, windows=interval)
        *_, outcome = Player(setting, {0: played}).play(trace)
        assert outcome.hits == [0, 2 * CHUNK, third, CHUNK]


@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_of_a_token_are_those_of_the_page(model: str) -> None:
    groups = layout(MODELS[model], 16)
    found = token_bytes(groups, 256, default_interval(groups))
    own = sum(sum(group.page_bytes) / group.block_tokens for group in groups)
    sizes = own, found.whole, found.dense_windows, found.windows, found.whole + found.windows
    cells = " | ".join(f"{size / 1024:.1f}" for size in sizes)
    page = Path(__file__).parents[2] / "docs" / "sizing.md"
    assert f"| {model} | {cells} |" in page.read_text()


# ---------------------------------------------------------------- files


def line(**changed: object) -> str:
    fields = {"timestamp": 5, "input_length": 1100, "output_length": 3, "hash_ids": [4, 9, 7]}
    return json.dumps(fields | changed)


def test_lines_that_are_no_requests_are_skipped_counted_and_named(tmp_path: Path) -> None:
    wrong = [
        "{",
        "7",
        line(hash_ids=[1.5]),
        line(hash_ids=[-1]),
        line(timestamp=-1),
        line(timestamp="soon"),
        line(input_length=1 << 60),
        line(timestamp=4),
        line(input_length=None),
        "[" * 100_000,
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([line(), *wrong, "", line(timestamp=6)]))
    trace = read(file)
    assert [r.pieces.tolist() for r in trace.requests] == [[4, 9]] * 2  # the third is not whole
    assert trace.wrong == len(wrong)
    assert trace.why[0] == "line 2: it is no JSON"
    file.write_text("\n".join(["{"] * (MOST_WRONG + 1)))
    with pytest.raises(UsageError, match=f"{MOST_WRONG + 1} lines are wrong, the first: line 1"):
        read(file)


@pytest.mark.parametrize(
    ("ids", "why"), [([9, 4], "9 follows nothing here, and 4 before"), ([4, 4], "4 follows 4 here")]
)
def test_ids_out_of_order_are_named(tmp_path: Path, ids: list[int], why: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join([line(), line(hash_ids=ids), line(hash_ids=[4, 9, 8])]))
    trace = read(file)
    assert len(trace.requests) == 2
    assert trace.wrong == 1
    assert f"line 2: hash_ids: {why}" in trace.why[0]


def test_a_csv_file_shares_what_its_prefix_ids_say(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    head = "time_s,input_tokens,output_tokens,prefix_id,prefix_tokens\n"
    file.write_text(head + "0,100,1,a,64\n1,100,1,a,64\n2,100,1,b,64\n3,100,1,,64\n4,1,1,a,9\n")
    trace = read(file)
    first, second, other, alone = [r.pieces.tolist() for r in trace.requests]
    assert first[:4] == second[:4]
    assert not set(first[4:]) & set(second[4:])
    assert not set(other) & set(first + second)
    assert not set(alone) & set(first + second + other)
    assert trace.why == ["line 6: prefix_tokens is more than input_tokens"]
    file.write_text("time_s,tokens\n0,1\n")
    with pytest.raises(UsageError, match="the columns of a CSV file are time_s,input_tokens"):
        read(file)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (" " * (5 << 20), "a line has more than 4194304 characters"),
        (
            "time_s,input_tokens,output_tokens,prefix_id,prefix_tokens\n1,9,1," + "a" * 200_000,
            "no CSV",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_said_so(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UsageError, match=why):
        read(file)


def test_a_trace_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_text, args=(line() + "\n",))
    writer.start()
    assert len(read(pipe).requests) == 1
    writer.join()


def test_a_prompt_of_more_chunks_than_a_lookup_may_have_is_cut() -> None:
    model = Model(16, layout((Layers(1, 8),), 16))
    trace = trace_of([range(1100)] * 2)
    *_, outcome = Player(Setting(1 << 28, 16), {0: model}).play(trace)
    assert outcome.hits == [0, 32_768 * 16]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt-5"], "--model gpt-5: it is one of llama-3-8b"),
        (["--l1", "0"], "--l1: 0 is not between 1 byte and"),
        (["--l1", "1GiB,"], "--l1: no size: ''; write it like"),
        (["--l1", "99999999TiB"], "--l1: 99999999TiB is not between"),
        (["--l2", "1GiB", "--l2-speed", "0"], "--l2-speed: 0 is not between"),
        (["--l1", "1KiB"], "a cache of 1024 bytes"),
        (["--chunk-tokens", "300"], "it must be a multiple of 16"),
        (["--flush", "on_evict"], "--flush: it says something of a tier: give --l2, too"),
        (["--l2", "1GiB", "--flush", "lazy"], "--flush: 'lazy': some of write_through,on_evict"),
        (["--l2", "1GiB", "--keep-loaded", "yes,yes"], "--keep-loaded: 'yes,yes': some of yes,no"),
        (["--l2", "1GiB", "--skip-slow-loads", "no"], "say how fast is fast with --prefill"),
        (["--tails", "maybe"], "--tails: 'maybe': some of yes,no, each once"),
        (["--token-bytes", "0"], "--token-bytes: '0' is no number between 1 and"),
        (["--html", "/proc/none/r.html"], "--html /proc/none/r.html: No such file"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line() + "\n")
    assert main(["simulate", str(file), "--token-bytes", "8", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "\n\n", None])
def test_a_trace_without_requests_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "trace.jsonl"
    if text is not None:
        file.write_text(text)
    assert main(["simulate", str(file)]) == 2
    assert ("it has no requests" if text is not None else "No such file") in capsys.readouterr().err


# ---------------------------------------------------------------- the command


def plotted(page: str, what: str) -> list[list[tuple[float, float]]]:
    """Of each plot of ``what`` by size its first line: where it lies across, and the values."""
    found = []
    for svg in re.findall(rf'<svg[^>]*"{what} by size of L1".*?</svg>', page):
        texts = re.findall(r'text-anchor="end">([\d.,]+)', svg)
        top = max(float(text.replace(",", "")) for text in texts)
        points = [pair.split(",") for pair in re.findall(r'points="([^"]*)"', svg)[0].split()]
        found.append([(float(x), top * (252 - float(y)) / 244) for x, y in points])
    return found


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    file = tmp_path / "chat.jsonl"
    assert main(["simulate", "--synth", "chat", "--requests", "400", str(file)]) == 0
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert main(["simulate", str(file), "--l1", "1GiB", "--token-bytes", "1024"]) == 0
    shown = capsys.readouterr().err.split("\r\x1b[K")[1:]
    if not terminal:
        assert shown == []
        return
    assert shown[:2] == ["chat.jsonl  reading", "chat.jsonl  the best possible eviction"]
    bars = [re.fullmatch(r"chat.jsonl  L1 1GiB  \[(#* *)\] +(\d+)%", one) for one in shown[2:-1]]
    found = [(len(bar[1]), bar[1].count("#"), int(bar[2])) for bar in bars if bar]
    assert [width for width, *_ in found] == [20] * len(bars)
    assert [full for _, full, _ in found] == [percent // 5 for *_, percent in found]
    assert found[-1][2] > found[0][2] > 0
    assert shown[-1] == "", "it goes away at the end"


@pytest.mark.parametrize("small", [True, False])
def test_the_page_marks_the_size_to_buy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: bool
) -> None:
    file, html = tmp_path / "chat.jsonl", tmp_path / "r.html"
    assert main(["simulate", "--synth", "chat", "--requests", "40", str(file)]) == 0
    sizes = "1MiB,2MiB" if small else "1MiB,8MiB,32MiB,1GiB"
    command = ["simulate", str(file), "--l1", sizes, "--token-bytes", "1024", "--html", str(html)]
    assert main(command) == 0
    advice, page = capsys.readouterr().out.splitlines()[-1], html.read_text()
    marks = re.findall(r'd="M([\d.]+) 8V252".*?>90% of all hits: (\w+)<', page)
    if small:
        assert "none of these sizes" in advice
        assert marks == []
        return
    ((across, size),) = marks
    assert f"L1 of {size} " in advice
    (line,) = plotted(page, "hit rate")
    assert float(across) == line[sizes.split(",").index(size)][0]


def test_a_made_up_trace_is_written_played_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, seed in product(("chat", "rag", "agents"), ("0", "1")):
        file = tmp_path / f"{kind}{seed}.jsonl"
        write = ["simulate", "--synth", kind, "--requests", "40", "--seed", seed, str(file)]
        assert main(write) == 0
        assert main(write) == 2  # it is there
        assert read(file).wrong == 0
    assert (tmp_path / "chat0.jsonl").read_text() != (tmp_path / "chat1.jsonl").read_text()
    capsys.readouterr()
    files, html = (
        [str(tmp_path / f"{kind}0.jsonl") for kind in ("chat", "rag")],
        tmp_path / "r.html",
    )
    flags = ["--l1", "8MiB,64MiB", "--l2", "1GiB", "--token-bytes", "1024"]
    speed = ["--prefill-tokens-s", "1000"]
    assert main(["simulate", *files, *flags, *speed, "--json", "--html", str(html)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["trace"] for row in rows] == ["chat0.jsonl"] * 2 + ["rag0.jsonl"] * 2
    for row in rows:
        assert 0 < row["hit_rate"] <= row["infinite_hit_rate"] < 1
        assert row["saved_prefill_s"] == pytest.approx(row["hit_tokens"] / 1000)
    page = html.read_text()
    assert page.count("<svg") == 2 * 4
    assert "http" not in page
    for number, trace in enumerate(("chat0.jsonl", "rag0.jsonl")):
        mine = [row for row in rows if row["trace"] == trace]
        for what, field in (("tokens saved", "hit_tokens"), ("prefill seconds saved", "saved_s")):
            values = [value for _, value in plotted(page, what)[number]]
            assert values == pytest.approx([row[field] for row in mine], rel=0.01)
        rates = [100 * row["hit_rate"] for row in mine]
        assert [y for _, y in plotted(page, "hit rate")[number]] == pytest.approx(rates, abs=0.3)
    assert main(["simulate", *files[:1], *flags[2:]]) == 0
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 79
    assert "L1 of" in table[-2]
    assert "a day" in table[-1]


SWEPT = {
    "--chunk-tokens": "256,512",
    "--tails": "no,yes",
    "--l2": "64MiB,1GiB",
    "--l2-speed": "1MB,1GB",
    "--flush": "write_through,on_evict",
    "--keep-loaded": "yes,no",
    "--skip-slow-loads": "yes,no",
}


def test_one_call_sweeps_all_that_changes_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, html, pages = tmp_path / "chat.jsonl", tmp_path / "r.html", ""
    assert main(["simulate", "--synth", "chat", "--requests", "12", str(file)]) == 0
    for several in (list(SWEPT)[:4], list(SWEPT)[4:]):
        values = {"--l2": "1GiB"} | {name: SWEPT[name] for name in several}
        flags = [text for pair in values.items() for text in pair]
        command = ["simulate", str(file), "--l1", "4MiB", "--token-bytes", "512", *flags]
        capsys.readouterr()
        assert main([*command, "--prefill-tokens-s", "9000", "--json", "--html", str(html)]) == 0
        rows = json.loads(capsys.readouterr().out)
        settings = [tuple(row[each.name] for each in fields(Setting)) for row in rows]
        assert len(set(settings)) == len(settings) == 2 ** len(several)
        pages += html.read_text()
    for name, text in SWEPT.items():
        shown = {"--chunk-tokens": "chunk", "--l2": "L2", "--l2-speed": "L2/s"}.get(name, name[2:])
        for value in text.split(","):
            assert f"{shown} {value.replace('1MB', '0.001GB')}" in pages


def test_the_page_about_it_shows_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
    (written,) = re.findall(r"^kvass (simulate --synth chat .*)$", page, re.M)
    ((command, table),) = re.findall(
        r"^kvass (simulate .*--skip-slow-loads .*)\n((?:.+\n)+)```", page, re.M
    )
    assert main(written.split()) == main(command.split()) == 0
    printed = capsys.readouterr().out
    assert table in printed
    assert table.replace("51.65%", "51.66%") not in printed  # the control


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "of llama-3-8b, 128KiB a token: assumed, the trace names no model"),
        (["--model", "gpt-oss-20b"], "KV cache of gpt-oss-20b, 48KiB a token"),
        (["--token-bytes", "1024"], "KV cache of 1KiB a token"),
    ],
)
def test_the_model_is_said_and_that_it_was_assumed(
    flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, html = tmp_path / "chat.jsonl", tmp_path / "r.html"
    assert main(["simulate", "--synth", "chat", "--requests", "5", str(file)]) == 0
    assert main(["simulate", str(file), "--l1", "1GiB", "--html", str(html), *flags]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert says in printed
    assert ("assumed" in printed) == (not flags)
    assert says in " ".join(html.read_text().split())
    assert main(["simulate", str(file), "--l1", "1GiB", "--json", *flags]) == 0
    assert says in json.loads(capsys.readouterr().out)[0]["geometry"]


def test_what_a_day_writes_to_the_tier_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jsonl"
    assert main(["simulate", "--synth", "chat", "--requests", "40", str(file)]) == 0
    times = [json.loads(line)["timestamp"] / 1000 for line in file.read_text().splitlines()]
    command = ["simulate", str(file), "--l1", "1MiB", "--token-bytes", "1024"]
    capsys.readouterr()
    assert main([*command, "--json", "--l2", "1GiB"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    day = one["l2_stored_bytes"] / (times[-1] - times[0]) * 86_400
    assert one["l2_stored_bytes_a_day"] == pytest.approx(day)
    assert main([*command, "--l2", "1GiB"]) == 0
    assert f"written to L2 a day: {Size(day).rounded()}" in capsys.readouterr().out.splitlines()
    assert main(command) == 0
    assert "a day" not in capsys.readouterr().out, "control: nothing is written"


def test_the_advice_names_the_least_size_that_has_most_of_the_hits() -> None:
    trace = trace_of([[1]])

    def result(l1: int, hit_tokens: int) -> Result:
        outcome = Outcome(Setting(l1 << 30, CHUNK), input_tokens=100, hit_tokens=hit_tokens)
        return Result(trace, outcome, optimal=0.5, infinite=0.5)

    sweep = [result(1, 20), result(2, 46), result(4, 50)]
    assert advice(sweep) == "L1 of 2GiB has 92% of the hits that are possible"
    assert "the best, 40%, is L1 of 1GiB" in advice(sweep[:1])
    assert "finds nothing" in advice([Result(trace, sweep[0].outcome, 0.0, 0.0)])
