"""The command ``kvass forget``: says that a client's session ended."""

from __future__ import annotations

from kvass.cli import daemon
from kvass.errors import ConfigError

_ABOUT = """Say that a client's session ended. What only this session used of L1 is the next to be
evicted, and goes to no tier any more. Until then it is still found. A later request of the session
revokes it."""


def run(argv: list[str]) -> int:
    """End a session. Raises ``ConfigError``, ``Unavailable``, ``Incompatible``."""
    parser = daemon.parser_of("forget", _ABOUT)
    parser.add_argument(
        "--session", metavar="ID", required=True, help="its name, as its requests give it"
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="the tenant of its requests (default: that of requests without one)",
    )
    own, named = daemon.parse(parser, argv)
    if not own.session:
        raise ConfigError("--session: it is empty; give the name that the requests have")
    with daemon.client(named) as client:
        rows = client.end_session(own.session, own.tenant)
        print(f"{rows} rows of session {own.session} are evicted first")
    return 0
