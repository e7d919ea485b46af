"""Python imports this when it starts a process of a tier: ``checked_daemon`` is its parent.

A tier that compresses remembers the forms of fewer records: those of 65,536, as usual, would look
like a leak.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from unittest import mock

from kvass.tiers import compressed
from tests.support.soak.memory import tell

SEEN: Final = 1024

mock.patch.object(compressed, "_MOST_SEEN", SEEN).start()
tell(Path(os.environ["SOAK_FOLDER"]))
