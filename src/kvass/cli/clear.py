"""The command ``kvass clear``: makes a daemon forget rows."""

from __future__ import annotations

from typing import Final

from kvass.arena.place import held_bytes, remove_place
from kvass.cli import daemon
from kvass.config import Size

_PATIENCE_S: Final = 300.0
"""Emptying an object store takes long: it deletes a thousand objects at a time."""
_ABOUT: Final = """Make a daemon forget all rows of L1, or with --model or --tenant some of them.
Without --tier, tiers keep the records on disk or in the store. After a clear of all rows or of a
model they never match again. After a clear of a tenant they still match, and a lookup may load
them into L1 again."""


def run(argv: list[str]) -> int:
    """Make the daemon forget rows. Raises ``Unavailable`` if there is no daemon; ``UnknownName``
    for a model or tenant that the daemon does not know; ``Refused`` if the daemon has no tiers to
    empty, or could not empty them; ``ConfigError`` for a folder that a daemon uses, or without an
    arena."""
    parser = daemon.parser_of("clear", _ABOUT)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tier", action="store_true", help="empty its tiers as well")
    what.add_argument(
        "--model",
        metavar="NAME",
        help="only the rows of the model that `kvass status` shows by this name; their records in "
        "tiers do not match any more",
    )
    what.add_argument(
        "--tenant",
        metavar="NAME",
        help="only the rows of L1 that count for this tenant; its records in tiers stay and match",
    )
    what.add_argument(
        "--arena",
        metavar="DIR",
        help="remove the memory that a daemon which has ended left in this folder; its tiers keep "
        "their records",
    )
    own, named = daemon.parse(parser, argv)
    if own.arena is not None:
        size = held_bytes(own.arena)
        remove_place(own.arena)
        print(f"removed {Size(size).rounded()} from {own.arena}")
        return 0
    with daemon.client(named) as client:
        if own.model is not None:
            rows = client.clear_model(own.model, timeout_s=_PATIENCE_S)
            print(f"cleared {rows} rows of {own.model}")
        elif own.tenant is not None:
            rows = client.clear_tenant(own.tenant, timeout_s=_PATIENCE_S)
            print(f"cleared {rows} rows of tenant {own.tenant}")
        else:
            rows = client.clear(everything=True, tiers=own.tier, timeout_s=_PATIENCE_S)
            print(f"cleared {rows} rows" + (" and all tiers" if own.tier else ""))
    return 0
