"""The installed vLLM under another version's name, with changed files: links to its own files."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

UNTESTED = "0.32.99"
"""Newer than what is installed, and older than what only the next version has."""


def installed() -> Path:
    """The folder of the package; nothing is imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def version_of(package: Path) -> str:
    """``vllm.__version__`` of a package."""
    found = re.search(r"__version__ = version = '(.*?)'", (package / "_version.py").read_text())
    assert found is not None
    return found[1]


def fake_vllm(folder: Path, *changes: tuple[str, str, str], version: str = UNTESTED) -> Path:
    """A package in ``folder``, which goes on the path of a process. ``changes``: a file, and what
    in it is replaced by what, once."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    _link(installed(), package)
    own = version_of(package)
    for file, old, new in [("_version.py", f"= '{own}'", f"= '{version}'"), *changes]:
        text = (package / file).read_text()
        assert old in text, (file, old)
        _unlink(package, Path(file))
        (package / file).write_text(text.replace(old, new, 1))
    return package


def move(package: Path, file: str, to: str) -> None:
    """Give a file of a fake package another name: what imports it there finds it."""
    old, new = (".".join(("vllm", *Path(one).with_suffix("").parts)) for one in (file, to))
    (package / to).write_text((package / file).read_text())
    _unlink(package, Path(file))
    for source in installed().rglob("*.py"):
        inner = source.relative_to(installed())
        if (package / inner).exists() and old in (text := (package / inner).read_text()):
            _unlink(package, inner)
            (package / inner).write_text(text.replace(old, new))


def _unlink(package: Path, file: Path) -> None:
    """Make the folders on the way to ``file`` real ones, of links, and take the file away."""
    for inner in [*reversed(file.parents)][1:]:
        folder = package / inner
        if folder.is_symlink():
            theirs = Path(os.readlink(folder))
            folder.unlink()
            folder.mkdir()
            _link(theirs, folder)
    (package / file).unlink()


def _link(theirs: Path, folder: Path) -> None:
    """All but compiled modules: those of changed files do not belong to the installed package."""
    for entry in theirs.iterdir():
        if entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)
