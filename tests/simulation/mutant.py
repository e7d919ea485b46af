"""What a break of the core is.

Law of this file: values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``edits``: (file under ``kvass/core``, text that is in it exactly once, what it becomes)."""

    name: str
    law: int
    edits: tuple[tuple[str, str, str], ...]


def one(name: str, law: int, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, law, ((file, old, new),))
