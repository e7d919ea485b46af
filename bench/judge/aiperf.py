"""AIPerf, in a virtual environment of its own (``requirements/peers.sh``), if it is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

FOLDER: Final = Path(".cache/aiperf")
MISSING: Final = "is not installed: bash requirements/peers.sh .venv aiperf"


def interpreter() -> str | None:
    """None: it is not installed, or not wholly."""
    whole = (FOLDER / ".made-from").exists()
    return str((FOLDER / "bin" / "python").absolute()) if whole else None


def version() -> str:
    """As pinned, or that it is missing."""
    if interpreter() is None:
        return MISSING
    (pinned,) = re.findall(r"(?m)^aiperf==(\S+)$", (FOLDER / ".made-from").read_text())
    return str(pinned)
