"""The command ``kvass quota``: changes the quotas of tenants."""

from __future__ import annotations

from kvass.cli import daemon
from kvass.config import Parser
from kvass.errors import ConfigError
from kvass.types import Quota


def run(argv: list[str]) -> int:
    """Set or remove quotas of tenants. Raises ``ConfigError``, ``Refused``,
    ``Unavailable``."""
    parser = Parser(prog="kvass quota", description="Change what tenants may have of L1.")
    daemon.add_daemon(parser)
    parser.add_argument(
        "--remove",
        metavar="NAME",
        action="append",
        default=[],
        help="take the quota of NAME away (repeatable)",
    )
    parser.add_argument("quota", nargs="*", metavar="NAME=CAP:RESERVED", help="like a=8GiB:2GiB")
    options = vars(parser.parse_args(argv))
    removed, texts = options.pop("remove"), options.pop("quota")
    try:
        quotas = [Quota.parse(text) for text in texts]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not quotas and not removed:
        raise ConfigError("name a quota, like team-a=8GiB:2GiB, or --remove NAME")
    with daemon.client(options) as client:
        for name in removed:
            client.set_quota(Quota(name), remove=True)
            print(f"{name} has no quota")
        for quota in quotas:
            client.set_quota(quota)
            print(quota)
    return 0
