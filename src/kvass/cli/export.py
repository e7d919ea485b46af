"""The command ``kvass export``: writes the rows of a client's session to standard output."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from kvass.cli import daemon
from kvass.client.carried_file import Writer
from kvass.client.carrying import RowClient, export_rows, promote, session_keys
from kvass.config import Parser
from kvass.errors import ConfigError
from kvass.tiers.key_file import KeyFile

if TYPE_CHECKING:
    from kvass.tiers.encryption import Encryption

_ABOUT = """Write the rows of a session's last prompt to standard output, for `kvass import` at
another daemon. Rows in tiers are loaded into L1 first."""


def run(argv: list[str]) -> int:
    """Export a session. Raises ``ConfigError``, ``CarryError``, ``Unavailable``, ``Refused``,
    ``Incompatible``."""
    parser = daemon.parser_of("export", _ABOUT)
    parser.add_argument(
        "--session", metavar="NAME", required=True, help="its name, as its requests give it"
    )
    add_carrying(parser)
    own, named = daemon.parse(parser, argv)
    if not own.session:
        raise ConfigError("--session: it is empty; give the name that the requests have")
    if sys.stdout.isatty():
        raise ConfigError("standard output is a terminal: write `kvass export ... > FILE`")
    encryption = encryption_of(own)
    with daemon.client(named) as client:
        what = session_keys(client, own.session, own.tenant)
        promote(client, what)
        place = daemon.place(named)
        with RowClient(place.socket, what, place.daemon_uid) as rows:
            writer = Writer(sys.stdout.buffer, what, encryption)
            done = export_rows(rows, writer, what)
    of, tokens = done.chunk_tokens, done.chunks * done.chunk_tokens
    say = f"{done.hit_chunks * of} of {tokens} tokens of its last prompt ({done.rows:,} rows)"
    print(f"{own.session}: {say}", file=sys.stderr)
    return 0


def add_carrying(parser: Parser) -> None:
    """Add the options that both commands have."""
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="the tenant of the session's requests (default: that of requests without one)",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        default="",
        help="encrypt the file with the first key of FILE, which is one of an encrypted tier",
    )


def encryption_of(own: Namespace) -> Encryption | None:
    """The encryption of the option ``--key-file``; None without it. Raises ``ConfigError``."""
    if not own.key_file:
        return None
    try:
        from kvass.tiers.encryption import Encryption
    except ImportError as error:
        raise ConfigError("--key-file: install kvass[encryption]") from error
    return Encryption(KeyFile(own.key_file))
