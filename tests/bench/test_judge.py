"""``make judge``: the page has the figures that others' programs wrote, the medians of the rounds.

What these programs and vLLM's servers write is made here; ``make judge`` starts real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.judge import __main__ as command
from bench.judge.__main__ import Judged, markdown, rows_of, shortened
from bench.judge.contenders import counted
from bench.judge.workloads import CHATS, TURNS, WORKLOADS, Place, Workload, trace
from bench.peers.engineless import Plan
from bench.peers.results import Results
from kvass.errors import ConfigError, Unavailable

VLLM, LMCACHE = WORKLOADS[0], WORKLOADS[-1]


def written(workload: Workload, *, failed: int = 0, ttft_ms: float = 80.0) -> dict[str, Any]:
    """What the workload's program writes."""
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


@pytest.mark.parametrize("workload", [VLLM, LMCACHE], ids=lambda one: one.name)
def test_the_figures_are_those_that_the_program_wrote(workload: Workload, tmp_path: Path) -> None:
    (tmp_path / workload.result).write_text(json.dumps(written(workload, ttft_ms=81.25)))
    figures = workload.figures(tmp_path)
    assert list(figures) == list(workload.metrics)
    assert figures["mean_ttft_ms"] == 81.25


@pytest.mark.parametrize("workload", [VLLM, LMCACHE], ids=lambda one: one.name)
def test_a_run_with_a_failed_request_has_no_figure(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="wrote no result"):
        workload.figures(tmp_path)
    (tmp_path / workload.result).write_text(json.dumps(written(workload, failed=1)))
    with pytest.raises(Unavailable, match=r"9 of 10 requests|1 requests failed"):
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
            workload.command(Place(plan.python, url, tmp_path / "model", tmp_path, 3))
            for url in ("http://one", "http://other")
        )
        assert [a for a, b in zip(one, other, strict=True) if a != b] == ["http://one"]
        assert one[one.index("--seed") + 1] == "3"
        text = shortened(one, plan)
        assert text.startswith("python -m ")
        assert str(tmp_path) not in text


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
