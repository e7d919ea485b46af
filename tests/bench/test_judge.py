"""``make judge``: the page has the figures that others' programs wrote, the medians of the rounds.

What these programs and vLLM's servers write is made here; ``make judge`` starts real ones."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.judge import __main__ as command
from bench.judge import model
from bench.judge.__main__ import Judged, markdown, rows_of, shortened
from bench.judge.contenders import CONTENDERS, Contender
from bench.judge.workloads import (
    AGENTS,
    PASSAGE,
    PASSAGES,
    STEPS,
    WORKLOADS,
    Place,
    Workload,
    chats,
)
from bench.peers.engineless import Plan
from bench.peers.results import Results
from kvass.errors import ConfigError, Unavailable
from tests.support.real_model import Words, needed

VLLM, LMCACHE, AIPERF, CHATS = (
    next(one for one in WORKLOADS if one.name == name)
    for name in ("prefix_repetition", "long-doc-qa", "agents", "chats")
)


def written(workload: Workload, *, failed: int = 0) -> dict[str, Any]:
    """What the workload's program writes."""
    if workload is AIPERF:
        times = {"unit": "ms", "avg": 1.5, "p50": 1.5, "p99": 1.5, "min": 0.5}
        return {
            "aiperf_version": "0.13.0",
            "request_count": {"unit": "requests", "avg": float(AGENTS * STEPS - failed)},
            "request_throughput": {"unit": "requests/sec", "avg": 1.5},
            "time_to_first_token": times,
            "inter_token_latency": times,
            "request_latency": times,
        }
    figures = dict.fromkeys(workload.metrics, 1.5)
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
def test_a_run_with_a_failed_request_has_no_figure(workload: Workload, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="wrote no result"):
        workload.figures(tmp_path)
    result = tmp_path / workload.result
    result.write_text(json.dumps(written(workload)))
    assert list(workload.figures(tmp_path)) == list(workload.metrics)
    result.write_text(json.dumps(written(workload, failed=1)))
    with pytest.raises(Unavailable, match=r"9 of (10|20) requests|1 requests failed"):
        workload.figures(tmp_path)


def test_the_page_has_who_leads_and_the_commands() -> None:
    judged = Judged(Results({"Cores": "2"}, {"LMCache": "0.5.6"}, 3, "today", minutes=9.6))
    rows = {row.what: row for row in rows_of(judged.results, VLLM)}
    for name, values in {"kvass": [80.0, 60.0, 99.0], "lmcache": [170.0, 160.0, 400.0]}.items():
        for value in values:
            rows["mean_ttft_ms"].add(name, value)
    judged.commands = {VLLM.name: "python -m bench.judge.client --seed 0"}
    page = markdown(judged)
    assert "| 170 (160 to 400) | 80 (60 to 99) |" in page
    assert "| **kvass** 2.12x" in page
    assert "# prefix_repetition\npython -m bench.judge.client --seed 0\n" in page
    assert "\n\nModel: 200 million random weights. Rounds: 3.\n" in page


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


def test_the_second_question_about_a_passage_finds_it_and_the_next_round_finds_nothing(
    tmp_path: Path,
) -> None:
    prompts = []
    for number in (0, 1):
        place = Place("python", "http://one", tmp_path, tmp_path, number, None)
        words = CHATS.command(place)
        assert "--ignore-eos" not in words, "answers end by themselves"
        assert words[words.index("--temperature") + 1] == "0"
        entries = json.loads(Path(words[words.index("--dataset-path") + 1]).read_text())
        prompts.append([entry["conversations"][0]["value"] for entry in entries])
        assert words[words.index("--num-prompts") + 1] == str(len(entries))
    for one, other in zip(prompts[0], prompts[0][PASSAGES:], strict=False):
        assert one != other
        assert shared(one, other) > PASSAGE
    assert max(shared(one, other) for one, other in zip(*prompts, strict=True)) < 32
    for number, one in enumerate(prompts[0][:PASSAGES]):
        assert all(shared(one, other) < 256 for other in prompts[0][number + 1 : PASSAGES])


def shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_no_chat_is_too_long_for_the_dataset(tmp_path: Path) -> None:
    words = Words(needed())
    place = Place("python", "http://one", tmp_path, tmp_path, 0, None)
    for entry in json.loads(chats(place).read_text()):
        assert len(words.tokens(entry["conversations"][0]["value"])) <= 1024


def test_servers_draft_where_answers_are_of_a_pretrained_model(tmp_path: Path) -> None:
    for drafts in (False, True):
        one = Contender("none", tmp_path, tmp_path / "log", "python", None, drafts=drafts)
        assert any("ngram" in word for word in one.command) == drafts


def test_without_the_pretrained_model_its_rows_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "real_model", lambda: None)
    judged = Judged(Results({}, {}, 1, ""))
    rows, plan = rows_of(judged.results, CHATS), Plan("python", tmp_path, tmp_path, 1)
    with ExitStack() as ending:
        assert not command.started(judged, plan, CHATS.model, rows, ending)
    for row in rows:
        assert list(row.trouble) == list(CONTENDERS)
        assert "no pretrained model: make setup says why" in row.trouble["kvass"]
    assert "no pretrained model" in markdown(judged)


def test_a_workload_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="long-doc-qa"):
        command.judge("nothing", 1, tmp_path / "judge.json")
