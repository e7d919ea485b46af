"""What cannot be imported: a tier of somebody's whose module fails."""

from __future__ import annotations

Tier = 1 // 0
