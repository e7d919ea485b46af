"""``kvass blend add``, and the example of ``docs/transformers.md``, of a model with a tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvass.cli.main import main
from kvass.testing.daemon import running_daemon
from tests.support import hf_models
from tests.support.hf_models import CHUNK, join, make, prompt
from tests.test_documents import ROOT

answers, folder = hf_models.answers, hf_models.folder


def text_of(ids: Any) -> str:
    return " ".join(f"word{token}" for token in ids[0].tolist())


def test_documents_of_files_are_found_in_prompts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = prompt(2 * CHUNK + 5, 30)
    file = tmp_path / "document.txt"
    file.write_text(text_of(document))
    with running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon:
        flags = ["--model", str(folder), "--socket", daemon.socket, "--chunk-tokens", str(CHUNK)]
        assert main(["blend", "add", str(file), *flags]) == 0
        assert (
            capsys.readouterr().out
            == f"{file}: {2 * CHUNK} of {2 * CHUNK + 5} tokens can be found\n"
        )
        with join(make(), daemon.socket, blend="first_k:8") as cached:
            asked = torch.cat([prompt(7, 31), document, prompt(9, 32)], 1)
            cached.generate(asked, max_new_tokens=2)
            assert (cached.last.blended, cached.last.recomputed) == (2 * CHUNK, 8)


def test_what_cannot_be_added_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, there = tmp_path / "empty.txt", tmp_path / "there.txt"
    empty.write_text(" \n")
    there.write_text("word5")
    for arguments, said in [
        ([str(empty), "--model", str(folder)], "it is empty"),
        ([str(tmp_path / "none.txt"), "--model", str(folder)], "No such file"),
        ([str(there), "--model", str(tmp_path)], f"--model {tmp_path}: "),
        (["--model", str(tmp_path), str(there)], f"--model {tmp_path}: "),
        ([str(there)], "--model"),
    ]:
        assert main(["blend", "add", *arguments, "--socket", str(tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.startswith("kvass: ")
        assert error.count("\n") == 1


def test_the_example_of_the_page_runs(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time it loads what the first one stored."""
    page = (ROOT / "docs/transformers.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 10
    with running_daemon(tmp_path, l1_size="64MiB", lookup_budget_ms=10_000) as daemon:
        monkeypatch.setenv("KVASS_SOCKET", daemon.socket)
        script = example.replace("YOUR_MODEL", str(folder))
        for loaded in (0, 1792):
            names: dict[str, Any] = {}
            exec(script.replace("connect(model", "connect(model, wait_s=30"), names)
            names["kv"].close()
            assert f"loaded={loaded}," in capsys.readouterr().out
