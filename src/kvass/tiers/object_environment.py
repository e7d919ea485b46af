"""What an object store's client has of the environment: its endpoint, and options of HTTP.

The client reads the environment itself, with two gaps. It forgets all options of HTTP there as soon
as it is given one, as ours are. And what is wrong with a variable it says late, or not at all.

Law of this file: no error has the value of a variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvass.errors import ConfigError
from kvass.tiers.options import ENDPOINT, NO_ENDPOINT, ObjectStoreOptions, is_secret
from kvass.tiers.url import remember_secret


class _Provider(NamedTuple):
    """``prefix``: of its variables. ``endpoints``: those with an endpoint; the first one counts.
    ``headers``: the prefix of those that go into headers."""

    prefix: str
    endpoints: tuple[str, ...]
    headers: str


_PROVIDERS: Final = {
    "s3": _Provider("AWS_", ("ENDPOINT_URL_S3", "ENDPOINT_URL", "ENDPOINT"), "AWS_"),
    "gcs": _Provider("GOOGLE_", ("BASE_URL",), "GOOGLE_BEARER"),
    "azure": _Provider("AZURE_", ("STORAGE_ENDPOINT", "ENDPOINT"), "AZURE_"),
}
_HTTP_OPTIONS: Final = (
    "allow_http",
    "allow_invalid_certificates",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "user_agent",
)
"""Those that we do not set. The client's names; a variable is the prefix and such a name."""
_TRUE: Final = ("1", "true", "on", "yes", "y")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_NO_SECRETS: Final = ("_ID", "_FILE", "_PATH", "_URI", "_CREDENTIALS")
"""How the names of variables end that have a name or a path, though they sound like secrets."""


def options_of_http(
    scheme: str, options: ObjectStoreOptions, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the options of HTTP that the environment has, by the client's names.

    Raises ``ConfigError`` about variables that the client panics at, or does not explain: one with
    a control character, and an endpoint that is none or not encrypted.
    """
    prefix, endpoints, headers = _PROVIDERS[scheme]
    mine = {name: value for name, value in environment.items() if name.startswith(prefix)}
    for name, value in mine.items():
        if name.startswith(headers) and not name.endswith("CERTIFICATE") and _CONTROL.search(value):
            raise ConfigError(f"{name} has a line break or another control character")
        if is_secret(name) and not name.endswith(_NO_SECRETS):
            remember_secret(value)
    for value in environment.values():  # proxies have logins, and not only the provider's
        remember_secret(value.partition("://")[2].rpartition("@")[0])
    found = {name: mine.get(prefix + name.upper(), "") for name in _HTTP_OPTIONS}
    where = next((prefix + name for name in endpoints if mine.get(prefix + name)), "")
    if where and not options.endpoint:
        if not ENDPOINT.fullmatch(mine[where]):
            raise ConfigError(f"{where}: {NO_ENDPOINT}")
        allowed = options.allow_http == "yes" or found["allow_http"].lower() in _TRUE
        if mine[where].startswith("http:") and not allowed:
            how = f"{prefix}ALLOW_HTTP=true, or allow_http=yes in the tier's URL"
            raise ConfigError(f"{where}: http is not encrypted; {how}, allows it")
    return {name: value for name, value in found.items() if value}
