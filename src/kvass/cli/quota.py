"""The command ``kvass quota``: changes the quotas of tenants."""

from __future__ import annotations

from kvass.cli import daemon
from kvass.errors import ConfigError
from kvass.types import Quota


def run(argv: list[str]) -> int:
    """Set or remove quotas of tenants. Raises ``ConfigError``, ``Refused``,
    ``Unavailable``."""
    parser = daemon.parser_of("quota", "Change what tenants may have of L1.")
    parser.add_argument(
        "--remove",
        metavar="NAME",
        action="append",
        default=[],
        help="take the quota of NAME away (repeatable)",
    )
    parser.add_argument("quota", nargs="*", metavar="NAME=CAP:RESERVED", help="like a=8GiB:2GiB")
    own, named = daemon.parse(parser, argv)
    try:
        quotas = [Quota.parse(text) for text in own.quota]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not quotas and not own.remove:
        raise ConfigError("name a quota, like team-a=8GiB:2GiB, or --remove NAME")
    with daemon.client(named) as client:
        for name in own.remove:
            client.set_quota(Quota(name), remove=True)
            print(f"{name} has no quota")
        for quota in quotas:
            client.set_quota(quota)
            print(quota)
    return 0
