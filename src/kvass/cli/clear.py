"""``kvass clear``."""

from __future__ import annotations

import os

from kvass.client.client import Client
from kvass.config import Parser, add_flags, load


def run(argv: list[str]) -> int:
    """Make the daemon forget all rows. Raises ``Unavailable`` if there is none."""
    parser = Parser(prog="kvass clear", description="Make a daemon forget all rows.")
    add_flags(parser, "socket")
    with Client(load(vars(parser.parse_args(argv)), os.environ).socket) as client:
        print(f"cleared {client.clear(everything=True)} rows")
    return 0
