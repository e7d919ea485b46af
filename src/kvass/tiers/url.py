"""Tier URLs: how a user names a tier.

A URL that cannot be used is a ``ConfigError`` of one line that says what to write instead.

``SCHEME:WHERE?option=value&option=value`` opens one of our own (``disk:/path?capacity=100GiB``);
``package.module:Name?option=value`` opens anybody's: ``Name`` is called with the options as keyword
arguments (strings; ``%xx`` decoded) and must return a ``Tier``.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from kvass.errors import ConfigError
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

if TYPE_CHECKING:
    from kvass.tiers.base import Tier

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
    scheme: str
    """One of ``OURS``, or the module of a plug-in."""
    where: str
    """Path or address; of a plug-in the name in its module."""
    options: dict[str, str]


def parse_tier_url(text: str) -> TierUrl:
    """Take ``text`` apart. Raises ``ConfigError``."""
    try:
        text.encode()  # bytes of a command line that are no UTF-8 arrive as lone surrogates
        if "\0" in unquote(text, errors="strict"):
            raise _refused(text, "there is a NUL in it")
    except UnicodeError as error:
        raise _refused(text, "it is not UTF-8") from error
    head, _, query = text.partition("?")
    scheme, colon, where = head.partition(":")
    if not colon or not scheme or not where:
        raise _refused(text, f"write SCHEME:WHERE?option=value, like {_EXAMPLE}")
    if scheme not in OURS and not _is_plug_in(scheme, where):
        known = ", ".join(OURS)
        raise _refused(text, f"unknown scheme {scheme!r}; known: {known}, module:Name")
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        if not name.isidentifier() or not equals:
            raise _refused(text, f"option {shown(part)!r} is not of the form name=value")
        if name in options:
            raise _refused(text, f"option {name!r} is given twice")
        options[name] = unquote(value)
    return TierUrl(scheme=scheme, where=unquote(where), options=options)


def read_tier_url(text: str) -> tuple[TierUrl, TierOptions | None]:
    """``text`` and its options, checked; of a plug-in, which checks its own, ``None``. Raises
    ``ConfigError``."""
    url = parse_tier_url(text)
    if url.scheme not in OURS:
        return url, None
    try:
        return url, read_options(OURS[url.scheme][1], url.options)
    except ValueError as error:
        raise _refused(text, error) from None


def _refused(text: str, why: object) -> ConfigError:
    """The text of an error about a tier URL, in one line and without secrets."""
    return ConfigError(f"tier {shown(text)!r}: {shown(' '.join(str(why).split()))}")


_SECRET: Final = re.compile(
    r"((?:^|[?&\s])\w*(?:password|secret|token|key|credential)\w*=)[^&\s'\"]*", re.IGNORECASE
)
_LOGIN: Final = re.compile(r"((?:^|[:/])[^:/?@\s]*:)[^/?@\s]*@")
_EXAMPLE: Final = "disk:/var/cache/kvass?capacity=100GiB"


def _is_plug_in(module: str, name: str) -> bool:
    return name.isidentifier() and bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module))


def shown(text: str) -> str:
    """A tier URL, or a part of one, without its secrets."""
    text = _SECRET.sub(r"\1***", text)
    return _LOGIN.sub(r"\1***@", text)


def tier_name(text: str) -> str:
    """The name of a tier in logs and reports: its URL without options and secrets."""
    return shown(text.partition("?")[0])


def open_tier(text: str) -> Tier:
    """Open the tier that ``text`` names. Raises ``ConfigError``."""
    from kvass.tiers.base import Tier  # it needs numpy, and reading a URL does not

    url, options = read_tier_url(text)
    if options is None:
        open_ = functools.partial(_import(text, url.scheme, url.where), **url.options)
    else:
        open_ = functools.partial(
            _import(text, *OURS[url.scheme][0].split(":")), url.where, options
        )
    try:
        tier = open_()
    except (ConfigError, OSError):  # the latter says what the system has against it
        raise
    except Exception as error:  # anybody's code: what it raises is said to a person
        raise _failed(text, error) from error
    if not isinstance(tier, Tier):
        raise _refused(text, f"it gives a {type(tier).__name__}, which is no Tier")
    return tier


def _failed(text: str, error: Exception) -> ConfigError:
    """A module or a factory raised what it may not."""
    why = ": ".join(filter(None, [type(error).__name__, said(error)]))
    return _refused(text, f"it cannot be opened: {why}")


def said(error: BaseException) -> str:
    """The text of any exception; empty if the exception cannot even be converted to text."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - its text is anybody's code, too
        return ""


def _import(text: str, module: str, name: str) -> Callable[..., object]:
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        extra = ""
        if error.name in _EXTRAS:
            extra = f"; install the extra: kvass[{_EXTRAS[error.name]}]"
        elif error.name == module and "." not in module:
            extra = f"; unknown scheme? ours are {', '.join(OURS)}"
        elif "libibverbs" in str(error):
            extra = "; Mooncake's package needs it: install your system's libibverbs (libibverbs1)"
        raise _refused(text, f"{error}{extra}") from error
    except Exception as error:  # as above: a module may do anything
        raise _failed(text, error) from error
    if not callable(found):
        raise _refused(text, f"{module}:{name} cannot be called")
    return found
