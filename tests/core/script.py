"""Scripts: stories of the core, one event a line, then what came of it.

A story begins with ``== `` and its name, on a machine of its own. A line is a command, and after it
``->`` the effects, ``|`` what changed of the state that everybody can see (``status``). Both are
written by ``python -m tests.core.script``, and read by whoever reviews the difference.

``tests/core/scripts/README.md`` has the commands.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest

from tests.core.story import Story

SCRIPTS: Final = Path(__file__).with_name("scripts")
HEADING: Final = "== "
MAKES: Final = ("machine ", "engine ", "ready ")
COLUMN: Final = 28
"""Where outcomes begin."""
WIDEST: Final = 100


def printed(command: str, effects: list[str], changes: str) -> str:
    """A command with its outcome, on one line if there is room."""
    parts = (f"-> {'; '.join(effects)}" if effects else "", f"| {changes}" if changes else "")
    outcome = "  ".join(part for part in parts if part)
    if not outcome:
        return command
    line = f"{command:<{COLUMN - 2}}  {outcome}"
    if len(line) <= WIDEST:
        return line
    if len(outcome) + 4 <= WIDEST:
        return f"{command}\n    {outcome}"
    lines = [command]
    for part in filter(None, parts):
        lines += textwrap.wrap(
            part,
            WIDEST,
            initial_indent=" " * 4,
            subsequent_indent=" " * 7,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def commands(text: str) -> list[str]:
    """The lines of a script without outcomes."""
    lines = (line for line in text.splitlines() if not line.startswith("    "))
    return [
        line if line.startswith(("#", HEADING)) else re.split(r"  +(?:->|\|)", line)[0].rstrip()
        for line in lines
    ]


def played(lines: Iterable[str], before: Iterable[str] = (), tolerant: bool = False) -> str:
    """The text of one story. ``before``: commands that are carried out first, and not shown, unless
    the story begins with another machine or engine. ``tolerant``: go on after a wrong line."""
    lines, before = [*lines], [*before]
    words = [x for line in lines if not line.startswith(("#", HEADING)) for x in line.split(" / ")]
    first = next((word for word in words if not word.startswith("limit ")), "")
    told = [word.split() for line in before for word in line.split(" / ")]
    made = {name for each in told if f"{each[0]} " in MAKES[1:] for name in each[1:]}
    if first.startswith(MAKES[0]) or (first.startswith(MAKES[1:]) and made & {*first.split()[1:]}):
        before = []
    with pytest.MonkeyPatch.context() as patch:
        story = Story(patch)
        for line in before:
            story.run(line)
        texts = []
        for line in lines:
            quiet = not line or line.startswith(("#", HEADING))
            try:
                texts.append(line if quiet else printed(line, *story.run(line)))
            except Exception as wrong:
                wrong.add_note(f"in the line: {line}")
                if not tolerant:
                    raise
                texts.append(f"{line}\n    !! {type(wrong).__name__}: {wrong}")
    return "\n".join(texts)


def stories(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The commands with which each story begins, and the name and the text of each story."""
    head, *parts = re.split(rf"^(?={HEADING})", text, flags=re.M)
    before = [line for line in head.splitlines() if line and not line.startswith("#")]
    return before, [(part.partition("\n")[0].removeprefix(HEADING), part) for part in parts]


def rewritten(text: str) -> str:
    """A script with its outcomes anew."""
    before, parts = stories(text)
    head = text[: -sum(len(part) for _, part in parts)]
    told = [played(commands(part), before, tolerant=True) for _, part in parts]
    return head + "\n".join(part.rstrip("\n") + "\n" for part in told)


def main(files: list[str]) -> int:
    """Write the outcomes of these scripts anew, or of all; 1 if a line cannot be carried out."""
    wrong = 0
    for path in map(Path, files or sorted(map(str, SCRIPTS.glob("*.txt")))):
        text = rewritten(path.read_text())
        path.write_text(text)
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("    !! "):
                print(f"{path}:{number}: {line.strip()}")  # noqa: T201
                wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
