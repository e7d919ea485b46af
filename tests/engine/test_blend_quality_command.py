"""``kvass blend quality``: how near answers are, by ways whose result is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvass.cli.main import main
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.quality import QualityLine, Shape, measure
from tests.support import hf_models
from tests.support.hf_models import VOCABULARY

folder = hf_models.folder


def texts(count: int = 3, words: int = 90) -> dict[str, str]:
    return {
        f"{n}.txt": " ".join(f"word{(7 * n + 3 * w * w) % VOCABULARY}" for w in range(words))
        for n in range(count)
    }


def measured(folder: Path, *blends: str) -> dict[str, QualityLine]:
    *_, lines = measure(str(folder), {}, texts(), blends, Shape(2, 3, 32, 6))
    return lines


def test_all_is_a_full_prefill_and_less_is_not(folder: Path) -> None:
    lines = measured(folder, "none", "kv_dev:0.5", "all")
    full, every, none = lines["full prefill"], lines["all"], lines["none"]
    assert max(every.kls + every.first_kls) < 1e-5
    assert every.losses == pytest.approx(full.losses, abs=1e-4)
    assert every.same == full.same == [1.0, 1.0]
    assert min(none.kls) > 1e-3
    assert (none.computed, lines["kv_dev:0.5"].computed) == ([0.0, 0.0], [0.5, 0.5])
    assert min(lines["no segments"].kls) > 1e-3


def test_without_moving_keys_answers_are_farther(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = measured(folder, "none")["none"]
    monkeypatch.setattr(Blender, "move", lambda *_: None)
    assert sum(measured(folder, "none")["none"].kls) > sum(moved.kls)


def test_a_command_prints_the_table_and_says_what_is_missing_in_a_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents, empty = tmp_path / "documents", tmp_path / "empty"
    documents.mkdir()
    empty.mkdir()
    for name, text in texts().items():
        (documents / name).write_text(text)
    command = ["blend", "quality", "--model", str(folder), "--segment-tokens", "32"]
    command += ["--answer-tokens", "4", "--prompts", "1", "--segments"]
    where = ["--documents", str(documents)]
    assert main([*command, "2", *where, "--blend", "first_k:8", "--device", "cpu"]) == 0
    *_, head, _, full, first, control = capsys.readouterr().out.splitlines()
    assert head.startswith("| computed again | share of the segments | KL, answer |")
    assert full.startswith("| full prefill | 100.0 % | 0.000 | 0.000 | 100.0 % |")
    assert first.startswith("| `first_k:8` | 25.0 % |")
    assert control.startswith("| no segments | 0.0 % |")
    for more, said in [
        (["2", "--documents", str(empty)], "is no folder with files"),
        (["2"], "name a folder with texts"),
        (["2", *where, str(documents / "0.txt")], "name a folder with texts"),
        (["2", *where, "--dtype", "float31"], "float31"),
        (["2", *where, "--device", "abacus"], "abacus"),
        (["2", *where, "--attention", "flash_attention_2"], "(choose from 'sdpa', 'eager')"),
        (["200", *where], "and the model reads"),
        (["50", *where], "segments of 32 tokens"),
        (["0", *where], "give 1 or more"),
        (["2", *where, "--blend", "last_k:3"], "blend 'last_k:3'"),
    ]:
        assert main([*command, *more]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.splitlines()[-1].startswith("kvass: ")
