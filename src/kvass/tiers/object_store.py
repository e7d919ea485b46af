"""How S3 and what speaks like it, Google Cloud Storage and Azure Blob Storage are reached.

Nothing is connected here. What is wrong with a URL or with the environment is a ``ConfigError`` of
one line; everything else shows, and passes, with the calls. Credentials come from the environment
and the places that the provider's own tools look at, never from the URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from obstore.store import AzureStore, GCSStore, S3Store

from kvass.errors import ConfigError
from kvass.tiers.object_tier import TROUBLE, ObjectTier, Store, error_line
from kvass.tiers.options import AzureOptions, ObjectStoreOptions, S3Options

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, RetryConfig, S3Config

_READ_TIMEOUTS: Final = 10
"""A request that goes on, but never for ``timeout_s`` without a byte, may take as many of them."""
_BUCKET: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{1,221}")
_PREFIX: Final = re.compile(r"(?!.*(^|/)\.{1,2}(/|$))[0-9A-Za-z._-]+(/[0-9A-Za-z._-]+)*")
_MOST_PREFIX: Final = 400
"""Of the 1024 bytes of an object's name a record needs 520."""
_ENVIRONMENT: Final = {"s3": "AWS_", "gcs": "GOOGLE_BEARER", "azure": "AZURE_"}
"""Variables whose values go into headers, where the client panics at a control character."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def open_s3(where: str, options: S3Options) -> ObjectTier:
    """``s3:BUCKET[/PREFIX]?...``. Raises ``ConfigError``."""
    config: S3Config = {}
    if options.endpoint:  # both, or the environment's wins
        config["endpoint"] = config["aws_endpoint_url_s3"] = options.endpoint
    if options.region:
        config["region"] = options.region
    return _open("s3", where, options, partial(S3Store, config=config), deletes_many=True)


def open_gcs(where: str, options: ObjectStoreOptions) -> ObjectTier:
    """``gcs:BUCKET[/PREFIX]?...``. Raises ``ConfigError``."""
    config: GCSConfig = {"base_url": options.endpoint} if options.endpoint else {}
    return _open("gcs", where, options, partial(GCSStore, config=config))


def open_azure(where: str, options: AzureOptions) -> ObjectTier:
    """``azure:CONTAINER[/PREFIX]?...``. Raises ``ConfigError``."""
    config: AzureConfig = {}
    if options.account:
        config["account_name"] = options.account
    if options.endpoint:
        config["endpoint"] = options.endpoint
    return _open("azure", where, options, partial(AzureStore, config=config))


def _open(
    scheme: str,
    where: str,
    options: ObjectStoreOptions,
    connect: Callable[..., Store],
    *,
    deletes_many: bool = False,
) -> ObjectTier:
    """``connect`` makes obstore's object of a bucket, and connects nowhere."""
    name = f"{scheme}:{where}"
    bucket, slash, prefix = where.removeprefix("//").partition("/")
    prefix = prefix.rstrip("/") if slash else "kvass"
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"{name}: {bucket!r} is no bucket; write {scheme}:BUCKET/PREFIX")
    if {"records", "notes"} & set(prefix.split("/")):
        raise ConfigError(f"{name}: records and notes are names of ours, not of a prefix")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > _MOST_PREFIX:
        raise ConfigError(
            f"{name}: {prefix!r:.100} is no prefix: names of 0-9 A-Z a-z . _ - with / between "
            f"them, at most {_MOST_PREFIX} characters"
        )
    for variable, value in os.environ.items():
        if variable.startswith(_ENVIRONMENT[scheme]) and _CONTROL.search(value):
            raise ConfigError(f"{name}: {variable} has a line break or another control character")
    try:
        client, retry = _limits(options)
        store = connect(bucket, client_options=client, retry_config=retry)
    except (*TROUBLE, ValueError) as error:
        raise ConfigError(f"{name}: {error_line(error)}") from None
    return ObjectTier(
        name,
        store,
        prefix=prefix,
        connections=options.connections,
        timeout_s=options.timeout_s,
        deletes_many=deletes_many,
    )


def _limits(options: ObjectStoreOptions) -> tuple[ClientConfig, RetryConfig]:
    """A server that is gone or silent is noticed in ``timeout_s``, not in the client's minutes."""
    timeout = timedelta(seconds=options.timeout_s)
    client: ClientConfig = {
        "connect_timeout": timeout,
        "read_timeout": timeout,
        "timeout": _READ_TIMEOUTS * timeout,
    }
    if options.allow_http:  # else what the environment says
        client["allow_http"] = True
    retry: RetryConfig = {
        "max_retries": 2,
        "retry_timeout": timeout,  # so what timed out is not tried again
        "backoff": {
            "init_backoff": timedelta(milliseconds=50),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        },
    }
    return client, retry
