"""The check of a vLLM that runs with the compiled parts of another version, and the table of such
versions in ``requirements/overlays.sh``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm._custom_ops  # noqa: F401  (it loads the compiled parts)

from kvass._version import TESTED_VLLM
from tests.support.vllm import compiled
from tests.support.vllm.compiled import OperationCall, misfits, why_not
from tests.support.vllm.fake_vllm import installed, version_of

ROOT = Path(__file__).parent.parent.parent
NORM = OperationCall("_C::rms_norm", "ops.py:1", (4, ()), of_cpu=False)
BEFORE = "def cpu_norm(*all):\n    _C.rms_norm(out, x, weight, 1e-5)\n    _C.gone(x)\n"


def package(folder: Path, text: str) -> Path:
    """A package ``vllm`` with one file of operations, and the version of the installed one."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "_version.py").write_text((installed() / "_version.py").read_text())
    (folder / "vllm" / "ops.py").write_text(text.replace("_C.", "torch.ops._C."))
    return folder


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ("_C.rms_norm(out, x, weight, epsilon=0.1)", ""),
        ("_C.rms_norm(*all)", ""),
        ("_C.rms_norm(out, x, weight)", "ops.py:1 gives _C::rms_norm other arguments than it "),
        ("_C.rms_norm(out, x, weight, 0.1, 2)", "ops.py:1 gives _C::rms_norm other arguments"),
        ("_C.rms_norm(out, x, weight, eps=0.1)", "ops.py:1 gives _C::rms_norm other arguments"),
        ("_C.rms_norm.default(out, weight, 0.1, x=x)", "ops.py:1 gives _C::rms_norm other arg"),
        ("_C.for_gpus(x)", ""),
        ("_C.new_cpu(x)", "ops.py:1 calls _C::new_cpu, which they do not have"),
        ("class CPUNorm:\n    def run():\n        _C.new(x)", "ops.py:3 calls _C::new, which they"),
        ("def cpu_norm():\n    _C.gone(x, x)", ""),
    ],
)
def test_what_they_do_not_serve_is_found(tmp_path: Path, new: str, found: str) -> None:
    """What did not fit before is for GPUs, or is not built."""
    folders = package(tmp_path / "new", new), package(tmp_path / "before", BEFORE)
    said = misfits(folders[0] / "vllm", folders[1] / "vllm")
    assert len(said) == bool(found)
    assert all(line.startswith(found) for line in said)


def test_one_line_says_why_they_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, own, version = package(tmp_path, BEFORE), installed().parent, version_of(installed())
    said = f"the Python of vLLM {version} does not fit the compiled parts of {version}: "
    monkeypatch.setattr(compiled, "IMPORTED", ("vllm._custom_ops",))
    monkeypatch.setattr(compiled, "calls", lambda package: [NORM])
    assert why_not(own, before) == ""
    wrong = [NORM._replace(place=f"ops.py:{n}", given=(n, ())) for n in (1, 2, 3)]
    monkeypatch.setattr(
        compiled, "calls", lambda package: wrong if package == installed() else [NORM]
    )
    assert why_not(own, before) == (
        f"{said}ops.py:1 gives _C::rms_norm other arguments than it takes (and 2 more)"
    )
    assert why_not(own, before, ("_C::rms_norm",)) == ""
    monkeypatch.setattr(compiled, "calls", lambda package: [])
    assert why_not(own, before) == said + "they cannot be loaded"
    monkeypatch.setattr(compiled, "IMPORTED", ("vllm._custom_ops", "orjson_of_nobody"))
    missing = "ModuleNotFoundError: No module named 'orjson_of_nobody'"
    assert why_not(own, before) == said + missing
    (tmp_path / "asks_early.py").write_text("import torch\ntorch.ops._C.gone_for_good\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled, "IMPORTED", ("asks_early",))
    assert why_not(own, before).startswith(f"{said}AttributeError: ")


def test_the_documentation_says_which_versions_run_with_compiled_parts_of_others() -> None:
    text = (ROOT / "requirements" / "overlays.sh").read_text()
    mixed = dict(re.findall(r"^  \[(\S+)\]=\"(\S+) ", text, re.MULTILINE))
    assert {*mixed, *mixed.values()} <= TESTED_VLLM
    rows = (ROOT / "docs" / "vllm.md").read_text().splitlines()
    for version in TESTED_VLLM:
        (row,) = (line for line in rows if line.startswith(f"| {version} |"))
        with_parts_of = re.findall(r"compiled parts of (\d\S+[^\s,.])", row)
        assert with_parts_of == ([mixed[version]] if version in mixed else [])
