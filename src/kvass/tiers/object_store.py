"""S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage: how they are reached.

Law of this file: nothing is connected here. What is wrong with a URL or with the environment is a
``ConfigError`` of one line; everything else shows, and passes, with the calls. Credentials come
from the environment and the places that the provider's own tools look at, never from the URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import ConfigError
from kvass.tiers.object_tier import TROUBLE, ObjectTier, Store, said

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

_PATIENCE: Final = 10
"""A request that goes on, but never for ``timeout_s`` without a byte, may take as many of them."""


def open_s3(
    where: str,
    *,
    endpoint: str = "",
    region: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``s3:BUCKET[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("s3", where, endpoint, allow_http, timeout_s, connections)
    config: S3Config = {}
    if endpoint:
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint  # or the environment's wins
    if region:
        config["region"] = _word(at.name, "region", region)
    return at.open(
        lambda: S3Store(at.bucket, config=config, client_options=at.client, retry_config=at.retry),
        bulk=True,
    )


def open_gcs(
    where: str,
    *,
    endpoint: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``gcs:BUCKET[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("gcs", where, endpoint, allow_http, timeout_s, connections)
    config: GCSConfig = {"base_url": endpoint} if endpoint else {}
    return at.open(
        lambda: GCSStore(at.bucket, config=config, client_options=at.client, retry_config=at.retry)
    )


def open_azure(
    where: str,
    *,
    account: str = "",
    endpoint: str = "",
    allow_http: str = "no",
    timeout_s: str = "10",
    connections: str = "32",
) -> ObjectTier:
    """``azure:CONTAINER[/PREFIX]?...``; ``ConfigError``, connects nowhere."""
    at = _address("azure", where, endpoint, allow_http, timeout_s, connections)
    config: AzureConfig = {}
    if account:
        config["account_name"] = _word(at.name, "account", account)
    if endpoint:
        config["endpoint"] = endpoint
    return at.open(
        lambda: AzureStore(
            at.bucket, config=config, client_options=at.client, retry_config=at.retry
        )
    )


class _Address(NamedTuple):
    """What all of them say alike."""

    name: str
    bucket: str
    prefix: str
    connections: int
    timeout_s: int
    client: ClientConfig
    retry: RetryConfig

    def open(self, make: Callable[[], Store], *, bulk: bool = False) -> ObjectTier:
        try:
            store = make()
        except (*TROUBLE, ValueError) as error:
            raise ConfigError(f"{self.name}: {said(error)}") from None
        return ObjectTier(
            self.name,
            store,
            prefix=self.prefix,
            connections=self.connections,
            timeout_s=self.timeout_s,
            bulk=bulk,
        )


_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}")
_PREFIX: Final = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[0-9A-Za-z._-]+(/[0-9A-Za-z._-]+)*")
_ENDPOINT: Final = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
_MOST: Final = {"timeout_s": 3600, "connections": 256}
_ENVIRONMENT: Final = {"s3": "AWS_", "gcs": "GOOGLE_BEARER", "azure": "AZURE_"}
"""What of it goes into headers, where the client panics at a control character."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_MOST_PREFIX: Final = 400
"""Of the 1024 bytes of an object's name a record needs 520."""


def _address(
    scheme: str, where: str, endpoint: str, allow_http: str, timeout_s: str, connections: str
) -> _Address:
    name = f"{scheme}:{where}"
    bucket, slash, prefix = where.removeprefix("//").partition("/")
    prefix = prefix.rstrip("/") if slash else "kvass"
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{name}: {bucket!r} is no bucket; write {scheme}:BUCKET/PREFIX")
    for variable, value in os.environ.items():
        if variable.startswith(_ENVIRONMENT[scheme]) and _CONTROL.search(value):
            raise ConfigError(f"{name}: {variable} has a line break or another control character")
    if {"records", "notes"} & set(prefix.split("/")):
        raise ConfigError(f"{name}: records and notes are names of ours, not of a prefix")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _MOST_PREFIX:
        raise ConfigError(
            f"{name}: {prefix!r:.100} is no prefix: names of 0-9 A-Z a-z . _ - with / between "
            f"them, at most {_MOST_PREFIX} characters"
        )
    _check_options(name, endpoint, allow_http, timeout_s=timeout_s, connections=connections)
    most_s = int(timeout_s)
    return _Address(
        name, bucket, prefix, int(connections), most_s, *_bounds(allow_http == "yes", most_s)
    )


def _check_options(name: str, endpoint: str, allow_http: str, **numbers: str) -> None:
    for option, text in numbers.items():
        most = _MOST[option]
        if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
            raise ConfigError(f"{name}: {option}: {text!r} is not 1..{most}")
    if allow_http not in ("yes", "no"):
        raise ConfigError(f"{name}: allow_http: {allow_http!r} is neither yes nor no")
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise ConfigError(f"{name}: endpoint: write https://HOST[:PORT], without user or query")
    if endpoint.startswith("http:") and allow_http == "no":
        raise ConfigError(f"{name}: endpoint: http is not encrypted; allow_http=yes allows it")


def _word(name: str, option: str, text: str) -> str:
    if not re.fullmatch("[0-9A-Za-z-]+", text):
        raise ConfigError(f"{name}: {option}: {text!r} is none: 0-9 A-Z a-z and - are allowed")
    return text


def _bounds(allow_http: bool, timeout_s: int) -> tuple[ClientConfig, RetryConfig]:
    """A server that is gone or silent is noticed in ``timeout_s``, not in the client's minutes."""
    silence = timedelta(seconds=timeout_s)
    client: ClientConfig = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "timeout": _PATIENCE * silence,
    }
    if allow_http:  # else what the environment says
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": silence,  # so what timed out is not tried again
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    return client, retry
