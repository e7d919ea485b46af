"""The variables that commands set for themselves. Import this file before numpy is imported."""

from __future__ import annotations

import os
from typing import Final

SET_HERE: Final = frozenset({"OPENBLAS_NUM_THREADS"} - os.environ.keys())
"""Those that were not set before. What ``kvass run`` starts does not get them."""

for _name in SET_HERE:  # or numpy allocates buffers for threads that are never used
    os.environ[_name] = "1"
