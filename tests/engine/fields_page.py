"""Writes ``docs/namespace-fields.md``: what of vLLM's settings is in a namespace, and why.

.venv/bin/python tests/engine/fields_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvass.connectors.vllm.fields import LISTS, NO_SETTINGS, Lists
from kvass.connectors.vllm.variables import VARIABLES

PAGE: Final = Path(__file__).parents[2] / "docs" / "namespace-fields.md"
INTRO: Final = """\
# What of vLLM's settings is in a namespace

Engines share KV if their namespaces are equal. A namespace is a digest of the fields of the
engine's identity (`connectors/vllm/namespace.py`) and of what each rank says of its pages. This
page lists every field of vLLM's configuration and every environment variable of `vllm.envs`:

- **in**: the value is part of the namespace, unless it is vLLM's default.
- **read**: it is part of the namespace by a rule of its own, or refused.
- **out**: it is no part of the namespace, for the reason given.

A field that is in no list goes in: it separates engines until somebody has decided, so a new field
of vLLM cannot be forgotten. A test fails for such a field (`tests/engine/test_fields.py`).

Three things are not seen: variables of libraries, variables of plug-ins (a plug-in's version is in
the namespace), and changes to vLLM's code that do not change its version.

This page is made from `connectors/vllm/fields.py` and `variables.py`. Change these, and write it
anew with `.venv/bin/python tests/engine/fields_page.py`.
"""


def table(lists: Lists) -> list[str]:
    """The rows of one class, in the order of the lists."""
    rows = ["", "| | why | fields |", "|---|---|---|"]
    for kind, reasons in (("in", lists.taken), ("read", lists.read), ("out", lists.left)):
        for reason, names in reasons.items():
            fields = ", ".join(f"`{name}`" for name in sorted(names.split()))
            rows.append(f"| {kind} | {reason} | {fields} |")
    return rows


def page() -> str:
    """The whole page."""
    lines = [INTRO]
    for name, lists in LISTS.items():
        lines += [f"## {name}", *table(lists), ""]
    lines += ["## Environment variables", *table(VARIABLES), ""]
    lines += ["## Classes of `vllm.config` that are not read", "", "| class | why |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(NO_SETTINGS.items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
