"""Python imports this when it starts a process of a tier: ``checked_daemon`` is its parent."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.soak.memory import tell

tell(Path(os.environ["SOAK_FOLDER"]))
