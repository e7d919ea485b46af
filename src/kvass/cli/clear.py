"""The command ``kvass clear``: makes a daemon forget all rows."""

from __future__ import annotations

from typing import Final

from kvass.cli import daemon
from kvass.config import Parser

_PATIENCE_S: Final = 300.0
"""Emptying an object store takes long: it deletes a thousand objects at a time."""


def run(argv: list[str]) -> int:
    """Make the daemon forget all rows. Raises ``Unavailable`` if there is no daemon, ``Refused`` if
    it has no tiers to empty, or could not empty them."""
    parser = Parser(prog="kvass clear", description="Make a daemon forget all rows.")
    daemon.add_daemon(parser)
    parser.add_argument("--tier", action="store_true", help="empty its tiers as well")
    options = vars(parser.parse_args(argv))
    tiers = options.pop("tier")
    with daemon.client(options) as client:
        patience_s = _PATIENCE_S if tiers else 30.0
        rows = client.clear(everything=True, tiers=tiers, timeout_s=patience_s)
    print(f"cleared {rows} rows" + (" and all tiers" if tiers else ""))
    return 0
