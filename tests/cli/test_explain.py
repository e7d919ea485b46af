"""``kvass explain``: its sentences, what it finds, and bad input."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.cli.explain import lines
from kvass.cli.main import main
from kvass.client.explanation import CAUSES, REASONS, is_request, sentence, span, users_id
from kvass.client.lookups import CLIENTS
from kvass.core.explain import HINTS
from kvass.core.metrics import MISSES
from kvass.core.rows import causes
from kvass.testing.daemon import running_daemon
from kvass.types import SHORT_NAME, short_name

Captured = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"
ENTRY: dict[str, Any] = {
    "request": "cmpl-1-0",
    "engine": "3f2a91c4-5d2c",
    "model": "qwen",
    "age_s": 1.0,
    "prompt_tokens": 1200,
    "local_tokens": 0,
    "hit_tokens": 768,
    "times": 1,
}


def test_every_reason_has_a_sentence_and_is_in_the_documents() -> None:
    known = {*MISSES, *HINTS, *CLIENTS}
    assert CAUSES.keys() == causes.CAUSES.keys()
    with_causes = set(causes.CAUSES.values())
    assert known <= REASONS.keys() | with_causes
    text = (DOCS / "explain.md").read_text()
    for name in (*REASONS, *CAUSES, *with_causes):
        assert f"`{name}`" in text or not name, name
    for why in (*REASONS, *with_causes):
        for cause in ("", *CAUSES):
            told = sentence({"why": why, "cause": cause, "end_token": 5, "left_s": 3.0})
            assert re.fullmatch(r"[A-Z].*\.", told), told
            assert "{" not in told
    assert "of a later daemon" in sentence({"why": "of a later daemon"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"why": "evicted", "cause": "capacity", "end_token": 768, "left_s": 252.0},
            "What follows token 768 was evicted 4.2 min ago to make room in L1.",
        ),
        ({"why": "absent"}, "Nobody stored the beginning of the prompt, as far as"),
        (
            {"why": "evicted", "cause": "capacity", "left_s": 1.0, "kind": "sliding_window"},
            "The beginning of the prompt in a sliding_window layer group was evicted 1 s ago",
        ),
        ({"why": "late", "waited_s": 0.1}, "with the beginning of the prompt after 100 ms."),
        (
            {"why": "other_namespace", "detail": "dtype: fp8, not bf16"},
            "They differ in dtype: fp8, not bf16.",
        ),
    ],
)
def test_sentences(fields: dict[str, Any], text: str) -> None:
    assert text in sentence(fields)


def test_a_hit_of_shadow_mode_is_told_as_one_that_would_come() -> None:
    entry = {**ENTRY, "text": "Nobody stored it."}
    assert any("768 from kvass" in line for line in lines(entry, 0.0))
    shadow = [line for line in lines({**entry, "shadow": True}, 0.0) if "768" in line]
    assert shadow == ["  1,200 tokens: 0 in the engine's own cache, 768 would come from kvass"]


def test_ids_of_requests() -> None:
    assert users_id("cmpl-1-0-aabbccdd") == "cmpl-1-0"
    assert users_id("1_chatcmpl-x-aabbccdd") == "chatcmpl-x"
    assert users_id("plain") == "plain"
    for wanted in ("cmpl-1", "cmpl-1-0", "cmpl-1-0-aabbccdd"):
        assert is_request("cmpl-1-0-aabbccdd", wanted)
    assert is_request("2_chatcmpl-x-aabbccdd", "chatcmpl-x")
    for other in ("cmpl", "cmpl-1-1", "cmpl-11", "cmpl-1-0-aabbccd", "."):
        assert not is_request("cmpl-1-0-aabbccdd", other)
    assert [span(s) for s in (0.005, 59, 90, 7200, 200_000)] == [
        *("5 ms", "59 s", "1.5 min", "2 h", "2.31 d"),
    ]


def test_ids_that_are_long() -> None:
    """They are known by their beginning and a digest, from the engine on."""
    name = "2_cmpl-" + "x" * 600 + "-0-aabbccdd"
    short = short_name(name)
    assert (len(short), users_id(short)) == (SHORT_NAME, short)
    for wanted in ("cmpl-" + "x" * 600, short, users_id(name)):
        assert is_request(short, wanted)
    for other in ("cmpl-x", "cmpl-" + "y" * 600, ""):
        assert not is_request(short, other)
    assert is_request(short_name("cmpl-a\nb-0-aabbccdd"), "cmpl-a\nb")


def test_lines_of_a_lookup() -> None:
    text = "What follows token 768 was evicted."
    first, second, third = lines({**ENTRY, "text": text, "request": "a\x1b"}, 1e9)
    assert re.fullmatch(r"\d\d:\d\d:\d\d  a\?  qwen \(3f2a91c4\)", first)
    assert second == "  1,200 tokens: 0 in the engine's own cache, 768 from kvass"
    assert third == f"  {text}"
    first, *_ = lines({**ENTRY, "text": text, "model": "/models/qwen/"}, 1e9)
    assert first.endswith("  qwen (3f2a91c4)"), "of a folder its name"
    _, second, *_ = lines({**ENTRY, "text": text, "prompt_tokens": 0, "times": 3}, 1e9)
    assert second.startswith("  ? tokens: ")
    assert second.endswith(", looked up 3 times")


def test_what_a_daemon_answers(tmp_path: Path, capsys: Captured) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, ExitStack() as ending:

        def said(*argv: str) -> tuple[int, str, str]:
            status = main(["explain", *argv, "--socket", daemon.socket])
            return status, *capsys.readouterr()

        assert said() == (0, "no request was looked up\n", "")
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        keys = [os.urandom(WIDTH) for _ in range(2)]
        rows.store(keys)
        rows.find([*keys, os.urandom(WIDTH)])
        status, out, _ = said()
        assert status == 0
        assert "Nobody stored what follows token" in " ".join(out.split())
        status, out, _ = said("--json", "-n", "1")
        (entry,) = json.loads(out)
        assert entry["why"] == "absent"
        assert said("--engine", entry["engine"][:3], "--request", entry["request"])[0] == 0
        text = "request other is not among the last 256 of its engine\n"
        assert said("--request", "other") == (0, text, "")
        assert said("--request", "other", "--json") == (0, "[]\n", "")
        for wrong in ("0", "257", "x"):
            status, _, err = said("-n", wrong)
            assert status == 2
            assert err.startswith("kvass: ")
            assert err.count("\n") == 1


def test_a_daemon_that_is_too_old(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvass.client.connection.FEATURES", ())
    with running_daemon(tmp_path, "1MiB") as daemon:
        assert main(["explain", "--socket", daemon.socket]) == 1
    assert capsys.readouterr().err == ("kvass: the daemon is older than this command: restart it\n")
