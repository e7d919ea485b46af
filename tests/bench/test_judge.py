"""``make judge``: the page has the figures that others' programs wrote, the medians of the rounds.

What these programs and vLLM's servers write is made here; ``make judge`` starts real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from bench.engine import SHAPE
from bench.judge import __main__ as command
from bench.judge import aiperf
from bench.judge.__main__ import Judged, judge_round, markdown, rows_of, shortened
from bench.judge.contenders import Contender, counted
from bench.judge.model import TEMPLATE, tokenizer
from bench.judge.workloads import AGENTS, CHATS, STEPS, TURNS, WORKLOADS, Place, Workload, trace
from bench.peers.engineless import Plan
from bench.peers.results import Results
from kvass.errors import ConfigError, Unavailable

VLLM, LMCACHE, AIPERF = (
    next(one for one in WORKLOADS if one.name == name)
    for name in ("prefix_repetition", "long-doc-qa", "agents")
)


def written(workload: Workload, *, failed: int = 0, ttft_ms: float = 80.0) -> dict[str, Any]:
    """What the workload's program writes."""
    if workload is AIPERF:
        times = {"unit": "ms", "avg": 1.5, "p50": 1.5, "p99": 1.5, "min": 0.5}
        return {
            "aiperf_version": "0.13.0",
            "request_count": {"unit": "requests", "avg": float(AGENTS * STEPS - failed)},
            "request_throughput": {"unit": "requests/sec", "avg": 1.5},
            "time_to_first_token": times | {"avg": ttft_ms},
            "inter_token_latency": times,
            "request_latency": times,
        }
    figures = dict.fromkeys(workload.metrics, 1.5) | {"mean_ttft_ms": ttft_ms}
    if workload is LMCACHE:
        counts = {"failed_requests": failed, "successful_requests": 10 - failed}
        return {"config": {"model": "m"}, "results": figures | counts}
    return figures | {
        "num_prompts": 10,
        "completed": 10 - failed,
        "failed": failed,
        "model_id": "m",
    }


@pytest.mark.parametrize("workload", [VLLM, LMCACHE, AIPERF], ids=lambda one: one.name)
def test_the_figures_are_those_that_the_program_wrote(workload: Workload, tmp_path: Path) -> None:
    (tmp_path / workload.result).write_text(json.dumps(written(workload, ttft_ms=81.25)))
    figures = workload.figures(tmp_path)
    assert list(figures) == list(workload.metrics)
    name = "time_to_first_token avg" if workload is AIPERF else "mean_ttft_ms"
    assert figures[name] == 81.25


@pytest.mark.parametrize("workload", [VLLM, LMCACHE, AIPERF], ids=lambda one: one.name)
def test_a_run_with_a_failed_request_has_no_figure(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="wrote no result"):
        workload.figures(tmp_path)
    (tmp_path / workload.result).write_text(json.dumps(written(workload, failed=1)))
    with pytest.raises(Unavailable, match=r"9 of (10|20) requests|1 requests failed"):
        workload.figures(tmp_path)


def test_what_a_server_counted_is_summed_over_its_engines() -> None:
    text = (
        "# TYPE vllm:prefix_cache_hits_total counter\n"
        'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 64.0\n'
        'vllm:prefix_cache_hits_total{engine="1",model_name="m"} 1e+03\n'
        'vllm:prefix_cache_hits_created{engine="0"} 9.0\n'
        'vllm:external_prefix_cache_hits_total{engine="0"} 5.0\n'
    )
    assert counted(text, "vllm:prefix_cache_hits_total") == 1064
    assert counted(text, "vllm:external_prefix_cache_hits_total") == 5
    assert counted("", "vllm:prefix_cache_hits_total") == 0


def test_the_page_has_the_median_of_the_rounds_who_leads_and_the_commands() -> None:
    judged = Judged(Results({"Cores": "2"}, {"LMCache": "0.5.6"}, 3, "today", minutes=9.6))
    rows = {row.what: row for row in rows_of(judged.results, VLLM)}
    assert set(rows) == {*VLLM.metrics, "prefix_cache_hits", "external_prefix_cache_hits"}
    for name, values in {"kvass": [80.0, 60.0, 99.0], "lmcache": [170.0, 160.0, 400.0]}.items():
        for value in values:
            rows["mean_ttft_ms"].add(name, value)
            rows["request_throughput"].add(name, 1000 / value)
    rows["mean_ttft_ms"].trouble["offloading"] = "it ended"
    judged.commands = {VLLM.name: "python -m bench.judge.client --seed 0"}
    page = markdown(judged)
    assert "today, 10 minutes." in page
    assert (
        "| mean_ttft_ms | ms | 170 (160 to 400) | 80 (60 to 99) | it ended | **kvass** 2.12x"
        in page
    )
    assert "| request_throughput | req/s | 5.88 (2.5 to 6.25) | 12.5 (10.1 to 16.7) |" in page
    assert "- LMCache: 0.5.6" in page
    assert "# prefix_repetition\npython -m bench.judge.client --seed 0\n" in page
    assert "{" not in page
    assert page.count("Not measured.") == len(WORKLOADS) - 1
    assert "Rounds: 3.\n" in page
    rows["mean_ttft_ms"].samples["kvass"].pop()
    assert "Rounds: 2. That is too few: who leads may be noise.\n" in markdown(judged)


def test_all_contenders_get_the_same_command_but_for_the_server(tmp_path: Path) -> None:
    plan = Plan("/bin/python3", tmp_path, tmp_path, 1)
    for workload in WORKLOADS:
        one, other = (
            workload.command(
                Place(plan.python, url, tmp_path / "model", tmp_path, 3, "/opt/python3")
            )
            for url in ("http://one", "http://other")
        )
        assert [a for a, b in zip(one, other, strict=True) if a != b] == ["http://one"]
        seed = "--random-seed" if workload is AIPERF else "--seed"
        assert one[one.index(seed) + 1] == "3"
        assert ("salt=3" in one) == ("lmcache.cli.main" in one)
        text = shortened(one, plan)
        assert text.startswith("/opt/python3 -m " if workload is AIPERF else "python -m ")
        assert str(tmp_path) not in text


def test_without_aiperf_its_rows_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiperf, "FOLDER", tmp_path / "aiperf")
    plan = Plan("/bin/python3", tmp_path, tmp_path, 1)
    judged = Judged(Results({}, {}, 1, "today"))
    rows = rows_of(judged.results, AIPERF)
    contender = Contender("kvass", tmp_path / "model", tmp_path, plan.python, None)
    judge_round(judged, plan, {"kvass": contender}, AIPERF, 0, rows)
    assert {row.trouble["kvass"] for row in rows} == {f"AIPerf {aiperf.version()}"}
    assert "- kvass: AIPerf is not installed: bash requirements/peers.sh" in markdown(judged)
    assert not judged.commands
    (tmp_path / "aiperf").mkdir()
    (tmp_path / "aiperf/.made-from").write_text("# why\naiofiles==24.1.0\naiperf==0.13.0\n")
    assert aiperf.version() == "0.13.0"
    assert shortened([str(aiperf.interpreter()), "-m", "aiperf"], plan) == "python -m aiperf"


def test_logs_and_reasons_are_kept_and_nothing_else(tmp_path: Path) -> None:
    folder, kept = tmp_path / "run", tmp_path / "out/logs"
    for name in (
        "vllm-kvass.log",
        "random-kvass-0.json",
        "model/config.json",
        "random-none-0/a.log",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    kept.mkdir(parents=True)
    (kept / "random-kvass-1.json").write_text("of an earlier run")
    command.keep_logs(folder, kept)
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        name: name for name in ("vllm-kvass.log", "random-kvass-0.json")
    }


def test_the_tokenizer_counts_words_as_tokens_and_tells_english_texts_apart() -> None:
    whole = tokenizer()
    assert whole.get_vocab_size() == SHAPE.vocab
    words = [token for token in whole.get_vocab() if re.fullmatch("Ġ[a-z]+", token)]
    assert len(words) > 8000, "long-doc-permutator takes as many"
    text = whole.decode(range(1000, 1100))
    assert whole.encode(text).ids == [*range(1000, 1100)]
    one, other = (whole.encode(text).ids for text in ("To be, or not", "to die, to sleep"))
    assert set(one) != set(other)
    assert whole.token_to_id("<unk>") not in one + other
    assert whole.decode(one) == " To be, or not"


def test_a_salt_stands_before_the_messages() -> None:
    template = jinja2.Template(TEMPLATE)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert template.render(messages=messages) == "a b "
    assert template.render(messages=messages, salt=0) == "0 a b "


def test_a_turn_of_the_trace_has_all_that_came_before(tmp_path: Path) -> None:
    entries = [json.loads(line) for line in trace(tmp_path).read_text().splitlines()]
    assert len(entries) == CHATS * TURNS
    for before, after in zip(entries, entries[CHATS:], strict=False):
        assert after["hash_ids"][: len(before["hash_ids"])] == before["hash_ids"]
        assert after["timestamp"] > before["timestamp"]
    assert not set(entries[0]["hash_ids"]) & set(entries[1]["hash_ids"])


def test_a_workload_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="long-doc-qa"):
        command.judge("nothing", 1, tmp_path / "judge.json")
