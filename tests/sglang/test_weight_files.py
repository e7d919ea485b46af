"""Which files name the weights that SGLang loads. Without SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.connectors.sglang.weight_files import Files, sources
from kvass.engine import weights
from kvass.engine.identity import Indescribable

COMMIT = "0123456789" * 4


def sources_of(model: str, **settings: Any) -> list[Any]:
    return [*sources(SimpleNamespace(model_path=model), settings.get, "")]


def test_all_files_count_but_hidden_ones_and_those_of_tokens(tmp_path: Path) -> None:
    for name in ("a.safetensors", "sub/b.bin", ".git/c", "tokenizer.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sources_of(str(tmp_path)) == [Files(tmp_path)]
    assert [*Files(tmp_path).files()] == ["a.safetensors", "sub/b.bin"]


def test_a_repository_is_at_its_commit_or_at_that_of_a_note_that_is_older_than_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some--one"
    (repo / "refs").mkdir(parents=True)
    note, snapshot = repo / "refs" / "main", repo / "snapshots" / COMMIT
    note.write_text(COMMIT)
    with pytest.raises(Indescribable, match="the weights of some/one are not in"):
        sources_of("some/one", revision=COMMIT)
    snapshot.mkdir(parents=True)
    assert sources_of("some/one", revision=COMMIT) == [Files(snapshot)]
    changed_ns = os.stat(note).st_ctime_ns
    monkeypatch.setattr(weights, "started_ns", lambda: changed_ns)
    assert sources_of("some/one") == [Files(snapshot)]
    monkeypatch.setattr(weights, "started_ns", lambda: changed_ns - 1)
    with pytest.raises(Indescribable, match="which commit of some/one was loaded is not known"):
        sources_of("some/one")
