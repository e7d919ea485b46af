"""The command ``kvass forget``: says that a client's session ended."""

from __future__ import annotations

from kvass.cli import daemon
from kvass.config import Parser
from kvass.errors import ConfigError

_ABOUT = """Say that a client's session ended. What only this session used of L1 is the next to be
evicted, and goes to no tier any more. Until then it is still found. A later request of the session
revokes it."""


def run(argv: list[str]) -> int:
    """End a session. Raises ``ConfigError``, ``Unavailable``, ``Incompatible``."""
    parser = Parser(prog="kvass forget", description=_ABOUT)
    daemon.add_daemon(parser)
    parser.add_argument(
        "--session", metavar="ID", required=True, help="its name, as its requests give it"
    )
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="the tenant of its requests (default: that of requests without one)",
    )
    options = vars(parser.parse_args(argv))
    session, tenant = options.pop("session"), options.pop("tenant")
    if not session:
        raise ConfigError("--session: it is empty; give the name that the requests have")
    with daemon.client(options) as client:
        print(f"{client.end_session(session, tenant)} rows of session {session} are evicted first")
    return 0
