"""The command ``kvass session``: shows, fetches or releases what a client's session has stored."""

from __future__ import annotations

from kvass.cli import daemon
from kvass.client.sessions import OPERATIONS
from kvass.errors import ConfigError

_ABOUT = """Show where the rows of a session's last prompt are, have them loaded from tiers before
the session's next request, or say that the session ended: what it alone used of L1 is then the
next to be evicted, and goes to no tier any more, but is found until then. The daemon remembers the
prompts of sessions until it restarts, also after their rows have left L1."""


def run(argv: list[str]) -> int:
    """Do one thing with a session. Raises ``ConfigError``, ``Refused``, ``Unavailable``,
    ``Incompatible``."""
    parser = daemon.parser_of("session", _ABOUT)
    parser.add_argument("session", metavar="NAME", help="its name, as its requests give it")
    parser.add_argument(
        "--tenant",
        metavar="NAME",
        default="",
        help="the tenant of its requests (default: that of requests without one)",
    )
    what = parser.add_mutually_exclusive_group()
    for name, operation in OPERATIONS.items():
        about = operation.about + (" (default)" if name == "show" else "")
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=about)
    own, named = daemon.parse(parser, argv)
    if not own.session:
        raise ConfigError("NAME: it is empty; give the name that the requests have")
    operation = OPERATIONS[own.what or "show"]
    with daemon.client(named) as client:
        print(f"{own.session}: {operation.say(operation.do(client, own.session, own.tenant))}")
    return 0
