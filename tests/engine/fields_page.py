"""Writes ``docs/namespace-fields.md``: what of vLLM's settings is in a namespace, and why.

.venv/bin/python tests/engine/fields_page.py

What is read or left out comes from ``connectors/vllm/fields.py``. What goes in as it is, and the
classes that no namespace reads, are kept on the page alone: add these there, by hand.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvass.connectors.vllm.fields import LISTS, VARIABLES, Lists

PAGE: Final = Path(__file__).parents[2] / "docs" / "namespace-fields.md"
ENVIRONMENT: Final = "Environment variables"
UNREAD: Final = "Classes of `vllm.config` that are not read"


def parse(page: str) -> dict[str, list[str]]:
    """The text under each heading, as lines; of what is before the first under ""."""
    parts = re.split(r"^## (.*)\n", page, flags=re.MULTILINE)
    texts = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    return {heading: text.strip().splitlines() for heading, text in texts.items()}


def taken(section: list[str]) -> list[str]:
    """The fields that go in, of one class's lines."""
    rows = [line for line in section if line.startswith("| in |")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[2])]


def unread() -> set[str]:
    """The classes that no namespace reads."""
    return set(re.findall(r"^\| `(\w+)` \|", "\n".join(parse(PAGE.read_text())[UNREAD]), re.M))


def page() -> str:
    """The whole page: the one that is there, with the present lists."""
    sections = parse(PAGE.read_text())
    intro, last = sections.pop(""), sections.pop(UNREAD)
    environment = sections.pop(ENVIRONMENT)
    lists = {**dict.fromkeys(sections, Lists()), **LISTS, ENVIRONMENT: VARIABLES}
    sections[ENVIRONMENT] = environment
    text = ["\n".join(intro)]
    for heading, of in lists.items():
        kept = [row for row in sections.get(heading, []) if row.startswith("| in |")]
        for kind, reasons in (("read", of.read), ("out", of.left)):
            for reason, names in reasons.items():
                fields = ", ".join(f"`{name}`" for name in sorted(names.split()))
                kept.append(f"| {kind} | {reason} | {fields} |")
        if kept:
            rows = ["| | why | fields |", "|---|---|---|", *kept]
            text.append(f"## {heading}\n\n" + "\n".join(rows))
    return "\n\n".join([*text, f"## {UNREAD}\n\n" + "\n".join(last)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
