"""Tier URLs: how a user names a tier.

A URL that cannot be used is a ``ConfigError`` of one line that says what to write instead.

``SCHEME:WHERE?option=value&option=value`` opens one of our own (``disk:/path?capacity=100GiB``);
``package.module:Name?option=value`` opens anybody's: ``Name`` is called with the options as keyword
arguments (strings; ``%xx`` decoded) and must return a ``Tier``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

import msgspec

from kvass.errors import ConfigError
from kvass.tiers.base import Tier
from kvass.tiers.options import (
    AzureOptions,
    DiskOptions,
    MooncakeOptions,
    ObjectStoreOptions,
    RedisOptions,
    S3Options,
    TierOptions,
    read_options,
)

OURS: Final[dict[str, tuple[str, type[TierOptions]]]] = {
    "disk": ("kvass.tiers.disk:open_disk", DiskOptions),
    "redis": ("kvass.tiers.redis:open_redis", RedisOptions),
    "s3": ("kvass.tiers.object_store:open_s3", S3Options),
    "gcs": ("kvass.tiers.object_store:open_gcs", ObjectStoreOptions),
    "azure": ("kvass.tiers.object_store:open_azure", AzureOptions),
    "mooncake": ("kvass.tiers.mooncake:open_mooncake", MooncakeOptions),
}
"""Scheme -> the function that opens it, called with WHERE and its options, and their kind."""

_EXTRAS: Final = {"redis": "redis", "obstore": "s3", "mooncake": "mooncake"}
"""A package that is missing -> the extra that brings it."""


class TierUrl(msgspec.Struct, frozen=True):
    """A tier URL in parts."""

    scheme: str
    """One of ``OURS``, or the module of a plug-in."""
    where: str
    """Path or address; of a plug-in the name in its module."""
    options: dict[str, str]


def parse_tier_url(text: str) -> TierUrl:
    """Take ``text`` apart. Raises ``ConfigError``."""
    _check_text(text)
    head, _, query = text.partition("?")
    scheme, colon, where = head.partition(":")
    if not colon or not scheme or not where:
        raise ConfigError(f"tier {shown(text)!r}: write SCHEME:WHERE?option=value, like {_EXAMPLE}")
    if scheme not in OURS and not _is_plug_in(scheme, where):
        known = ", ".join(OURS)
        raise ConfigError(
            f"tier {shown(text)!r}: unknown scheme {scheme!r}; known: {known}, module:Name"
        )
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if not name.isidentifier() or not equals:
            raise ConfigError(
                f"tier {shown(text)!r}: option {shown(part)!r} is not of the form name=value"
            )
        if name in options:
            raise ConfigError(f"tier {shown(text)!r}: option {name!r} is given twice")
        options[name] = unquote(value)
    return TierUrl(scheme=scheme, where=unquote(where), options=options)


def _check_text(text: str) -> None:
    """What no process could be told of."""
    try:
        text.encode()  # bytes of a command line that are no UTF-8 arrive as lone surrogates
        unquote(text, errors="strict")
    except UnicodeError as error:
        raise ConfigError(f"tier {shown(text)!r}: it is not UTF-8") from error
    if "\0" in unquote(text):
        raise ConfigError(f"tier {shown(text)!r}: there is a NUL in it")


_SECRET: Final = re.compile(
    r"((?:^|[?&\s])\w*(?:password|secret|token|key|credential)\w*=)[^&\s'\"]*", re.IGNORECASE
)
_LOGIN: Final = re.compile(r"((?:^|[:/])[^:/?@\s]*:)[^/?@\s]*@")
_EXAMPLE: Final = "disk:/var/cache/kvass?capacity=100GiB"


def _is_plug_in(module: str, name: str) -> bool:
    return name.isidentifier() and bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module))


def shown(text: str) -> str:
    """A tier URL, or what is quoted of one, without its secrets."""
    text = _SECRET.sub(r"\1***", text)
    return _LOGIN.sub(r"\1***@", text)


def tier_name(text: str) -> str:
    """What to call a tier in front of people: its URL without options and secrets."""
    return shown(text.partition("?")[0])


def open_tier(text: str) -> Tier:
    """Open the tier that ``text`` names. Raises ``ConfigError``."""
    url = parse_tier_url(text)
    if url.scheme in OURS:
        path, kind = OURS[url.scheme]
        try:
            options = read_options(kind, url.options)
        except ValueError as error:
            raise ConfigError(shown(f"tier {text!r}: {error}")) from None
        opener = _import(text, *path.split(":"))
        open_ = functools.partial(opener, url.where, options)
    else:
        opener = _import(text, url.scheme, url.where)
        _check_options(text, opener, url.options)
        open_ = functools.partial(opener, **url.options)
    try:
        tier = open_()
    except (ConfigError, OSError):  # the latter says what the system has against it
        raise
    except Exception as error:  # anybody's code: what it raises is said to a person
        raise _refusal(text, error) from error
    if not isinstance(tier, Tier):
        raise ConfigError(
            f"tier {shown(text)!r}: it gives a {type(tier).__name__}, which is no Tier"
        )
    return tier


def _refusal(text: str, error: Exception) -> ConfigError:
    """A factory raised what it may not."""
    try:
        said = shown(" ".join(str(error).split()))
    except Exception:  # noqa: BLE001 - anybody's exception, too
        said = ""
    words = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return ConfigError(f"tier {shown(text)!r}: it cannot be opened: {words}")


def _import(text: str, module: str, name: str) -> Callable[..., object]:
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = _EXTRAS.get(error.name or "")
        extra = f"; install the extra: kvass[{missing}]" if missing else ""
        if error.name == module.partition(".")[0] and "." not in module:
            extra = f"; unknown scheme? ours are {', '.join(OURS)}"
        if "libibverbs" in str(error):
            extra = "; Mooncake's package needs it: install your system's libibverbs (libibverbs1)"
        raise ConfigError(f"tier {shown(text)!r}: {error}{extra}") from error
    except Exception as error:  # as above: a module may do anything
        raise _refusal(text, error) from error
    if not callable(found):
        raise ConfigError(f"tier {shown(text)!r}: {module}:{name} cannot be called")
    return found


def _check_options(text: str, plug_in: Callable[..., object], options: dict[str, str]) -> None:
    try:
        signature = inspect.signature(plug_in)
    except ValueError as error:
        raise ConfigError(f"tier {shown(text)!r}: {error}") from error
    try:
        signature.bind(**options)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        unknown = [name for name in options if name not in signature.parameters]
        wrong = f"unknown option {unknown[0]!r}" if unknown else str(error)
        raise ConfigError(f"tier {shown(text)!r}: {wrong}; its options: {names}") from error
