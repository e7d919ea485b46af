"""The rig that most tests of the core use, and the collection of ``tests/core/scripts``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core import script
from tests.core.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> Script | None:
    if file_path.suffix == ".txt" and file_path.parent.name == "scripts":
        return Script.from_parent(parent, path=file_path)
    return None


class Script(pytest.File):
    """A file of stories; each is a test."""

    def collect(self) -> Iterator[Story]:
        before, stories = script.stories(self.path.read_text())
        for name, part in stories:
            yield Story.from_parent(self, name=name, text=part, before=before)


class Story(pytest.Item):
    def __init__(self, text: str, before: list[str], **options: Any) -> None:
        super().__init__(**options)
        self.text, self.before = text, before

    def runtest(self) -> None:
        told = script.played(script.commands(self.text), self.before)
        if told.split() != self.text.split():
            before, after = self.text.rstrip().splitlines(), told.rstrip().splitlines()
            difference = difflib.unified_diff(before, after, "script", "what came", lineterm="")
            raise AssertionError("\n".join(difference))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, AssertionError) and "+++" in str(excinfo.value):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)
