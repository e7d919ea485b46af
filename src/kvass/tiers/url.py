"""Tier URLs: the text with which a user chooses a tier and its options.

``SCHEME:WHERE?option=value&option=value`` opens a built-in tier (``disk:/path?capacity=100GiB``).
``package.module:Name?option=value`` opens a plug-in: ``Name`` is called with the options as keyword
arguments (strings; ``%xx`` decoded) and must return a ``Tier``.

An invalid URL raises ``ConfigError`` with one line that says what to write instead.

Law of this file: of a secret no part is shown. In a URL that is refused nobody knows where a secret
ends, so nothing is shown that may belong to one. What was a secret in any URL of this process is
hidden in all its texts (``redacted``).
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

import msgspec

from kvass.errors import ConfigError
from kvass.tiers.options import (
    ESCAPES,
    SECRET_NAME,
    AzureOptions,
    DiskOptions,
    MooncakeOptions,
    ObjectStoreOptions,
    RecordOptions,
    RedisOptions,
    S3Options,
    SealedOptions,
    TierOptions,
    host_and_port,
    is_secret,
    read_options,
)

if TYPE_CHECKING:
    from kvass.tiers.base import Tier

BUILT_IN_TIERS: Final[dict[str, tuple[str, type[TierOptions]]]] = {
    "disk": ("kvass.tiers.disk:open_disk", DiskOptions),
    "redis": ("kvass.tiers.redis:open_redis", RedisOptions),
    "s3": ("kvass.tiers.object_store:open_s3", S3Options),
    "gcs": ("kvass.tiers.object_store:open_gcs", ObjectStoreOptions),
    "azure": ("kvass.tiers.object_store:open_azure", AzureOptions),
    "mooncake": ("kvass.tiers.mooncake:open_mooncake", MooncakeOptions),
}
"""Scheme -> (the function that opens such a tier, called with WHERE and the options; the type of
the options)."""

_EXTRAS: Final = {
    "redis": "redis",
    "obstore": "s3",
    "mooncake": "mooncake",
    "cryptography": "encryption",
    "zstandard": "compress",
}
"""Package -> the extra of kvass that installs it."""


class TierUrl(msgspec.Struct, frozen=True):
    scheme: str
    """One of ``BUILT_IN_TIERS``, or the module of a plug-in."""
    where: str
    """The path or address. For a plug-in: the name in its module."""
    options: dict[str, str]


def parse_tier_url(text: str) -> TierUrl:
    """Parse ``text`` without checking the options. Raises ``ConfigError``."""
    try:
        text.encode()  # invalid UTF-8 of a command line arrives as lone surrogates
        if "\0" in unquote(text, errors="strict"):
            raise _refused(text, "there is a NUL in it")
    except UnicodeError as error:
        raise _refused(text, "it is not UTF-8") from error
    _remember_secrets_of(text)
    head, _, query = text.partition("?")
    scheme, colon, where = head.partition(":")
    if not colon or not scheme or not where:
        raise _refused(text, f"write SCHEME:WHERE?option=value, like {_EXAMPLE}")
    if scheme not in BUILT_IN_TIERS and not _is_plug_in(scheme, where):
        known, said = ", ".join(BUILT_IN_TIERS), "" if "@" in text else f" {scheme!r}"
        raise _refused(text, f"unknown scheme{said}; known: {known}, module:Name")
    if scheme != "disk" and "@" in unquote(where):
        hint = "; redis has the options username and password" if scheme == "redis" else ""
        raise _refused(
            text, f"write {scheme}:WHERE?option=value instead of a URL with a login{hint}"
        )
    options: dict[str, str] = {}
    for number, part in enumerate(query.split("&") if query else (), 1):
        name, equals, value = part.partition("=")
        if not name.isidentifier() or not equals:
            raise _refused(text, f"option {number} is not of the form name=value; {ESCAPES}")
        if name in options:
            raise _refused(text, f"option {number} is given twice; {ESCAPES}")
        options[name] = unquote(value)
    return TierUrl(scheme=scheme, where=unquote(where), options=options)


def read_tier_url(text: str) -> tuple[TierUrl, TierOptions | None]:
    """Parse ``text`` and check its options. Returns the URL and the options. The options are
    ``None`` for a plug-in, which checks them itself. Raises ``ConfigError``."""
    url = parse_tier_url(text)
    if url.scheme not in BUILT_IN_TIERS:
        return url, None
    try:
        options = read_options(BUILT_IN_TIERS[url.scheme][1], url.options)
        if url.scheme in _AT_PORTS and not url.where.startswith("/"):
            host_and_port(url.scheme, url.where, 1)
    except (ValueError, ConfigError) as error:
        raise _refused(text, error) from None
    return url, options


def _refused(text: str, why: object) -> ConfigError:
    """Return the error for a tier URL: one line, without secrets."""
    said = shown(text, accepted=False)
    return ConfigError(f"tier {said!r}: {' '.join(redacted(str(why)).split())}")


_SECRET: Final = re.compile(rf"\b((?!key_file=){SECRET_NAME}=)(?!\*\*\*)(\S.*)", re.IGNORECASE)
_LOGIN: Final = re.compile(r"([\w.+-]+:(?://|(?!/)))(\S.*)@")
_EXAMPLE: Final = "disk:/var/cache/kvass?capacity=100GiB"
_AT_PORTS: Final = ("redis", "mooncake")
_LEAST_CHARS: Final = 6
"""Shorter secrets are not sought in texts: they would be found where they are not."""
_secrets: set[str] = set()
"""The secrets that this process has seen, in each way in which a text may have them."""


def remember_secret(value: str) -> None:
    """From now on no text of this process has ``value``."""
    if len(value) >= _LEAST_CHARS:
        ways = value, quote(value, errors="replace"), quote(value, "", errors="replace")
        _secrets.update((*ways, repr(value)[1:-1], json.dumps(value)[1:-1]))


def _remember_secrets_of(text: str) -> None:
    """Remember what may be a secret in a tier URL, however far it goes."""
    options = rf"[?&]({SECRET_NAME})=(?=(([^&]*).*))"
    for name, rest, value in re.findall(options, text, re.IGNORECASE | re.DOTALL):
        for secret in (rest, value, unquote(value)) if is_secret(name) else ():
            remember_secret(secret)
    login, at, _ = text.partition(":")[2].rpartition("@")
    if at and not text.startswith("disk:"):
        remember_secret(login.lstrip("/"))
        remember_secret(login.lstrip("/").partition(":")[2].lstrip("/"))


def _is_plug_in(module: str, name: str) -> bool:
    return name.isidentifier() and bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module))


def redacted(text: str) -> str:
    """Return ``text`` without secrets: those that this process has seen, and whatever looks like a
    login, or like an option with a secret. The rest of a line after the latter may belong to it."""
    guessed = [*_SECRET.finditer(text), *_LOGIN.finditer(text)]
    return _masked(text, [*_seen_in(text), *(match.span(2) for match in guessed)])


def without_seen(text: str) -> str:
    """Return ``text`` without the secrets that this process has seen."""
    return _masked(text, _seen_in(text))


def _seen_in(text: str) -> list[tuple[int, int]]:
    spans = []
    for secret in [*_secrets]:  # a copy, because other threads add to it
        at = text.find(secret)
        while at >= 0:
            spans.append((at, at + len(secret)))
            at = text.find(secret, at + 1)
    return spans


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    """Return ``text`` with ``***`` in place of the spans, which may overlap."""
    begin = len(text) + 1
    for low, high in sorted(spans, key=lambda span: (-span[1], span[0])):
        if high < begin:
            text = f"{text[:low]}***{text[high:]}"
        elif low < begin:
            text = text[:low] + text[begin:]
        begin = min(begin, low)
    return text


def shown(text: str, accepted: bool = True) -> str:
    """Return a tier URL for people. ``accepted``: it was, so each option ends where it seems to.
    Otherwise nothing is shown from the first secret on, and of a login only the scheme."""
    head, mark, query = text.partition("?")
    scheme, _, where = head.partition(":")
    if "@" in unquote(where if accepted else text) and scheme != "disk":
        return f"{scheme}:***" if scheme in BUILT_IN_TIERS else "***"
    known = BUILT_IN_TIERS[scheme][1].__struct_fields__ if scheme in BUILT_IN_TIERS else None
    parts: list[str] = []
    for part in query.split("&"):
        name, equals, value = part.partition("=")
        plain = bool(equals) and (name.isidentifier() if known is None else name in known)
        fine = not part or (plain and "@" not in value and not (value and is_secret(name)))
        parts.append(part if fine else f"{name}=***" if plain else "***")
        if not (fine or accepted):
            break
    return head + mark + "&".join(parts)


def tier_name(text: str) -> str:
    """Return the name of a tier in logs and in the status: its URL without options and secrets."""
    return shown(text.partition("?")[0])


def open_tier(text: str) -> Tier:
    """Open the tier of the URL ``text``. Raises ``ConfigError``, or ``OSError`` of the system."""
    from kvass.tiers.base import Tier  # imported here, because parsing a URL needs no numpy

    url, options = read_tier_url(text)
    if options is None:
        open_ = functools.partial(_import(text, url.scheme, url.where), **url.options)
    else:
        module, _, name = BUILT_IN_TIERS[url.scheme][0].partition(":")
        open_ = functools.partial(_import(text, module, name), url.where, options)
    try:
        if isinstance(options, SealedOptions) and options.key_file:
            encrypted = _import(text, "kvass.tiers.encrypted", "open_encrypted")
            open_ = functools.partial(encrypted, open_, options.key_file)
        if isinstance(options, RecordOptions) and _compresses(options):
            compressed = _import(text, "kvass.tiers.compressed", "open_compressed")
            how = {"remote": url.scheme != "disk", "never": options.over_rdma}
            open_ = functools.partial(compressed, open_, options.compress, **how)
        tier = open_()
    except (ConfigError, OSError):
        raise
    except Exception as error:  # a plug-in may raise anything; the user gets one line
        raise _failed(text, error) from error
    if not isinstance(tier, Tier):
        raise _refused(text, f"it gives a {type(tier).__name__}, which is no Tier")
    return tier


def _compresses(options: RecordOptions) -> bool:
    """Whether a tier compresses records, or may. ``auto`` does not without a library for it."""
    if options.compress == "auto":
        with suppress(ImportError):
            return bool(importlib.import_module("kvass.tiers.zstd"))
    return options.compress == "lossless"


def _failed(text: str, error: Exception) -> ConfigError:
    """Return the error for an unexpected exception of a module or a factory."""
    why = ": ".join(filter(None, [type(error).__name__, error_text(error)]))
    return _refused(text, f"it cannot be opened: {why}")


def error_text(error: BaseException) -> str:
    """Return ``str(error)``, or an empty text if that raises."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - __str__ of a plug-in's exception may raise anything
        return ""


def _import(text: str, module: str, name: str) -> Callable[..., object]:
    try:
        found: object = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        extra = ""
        if error.name in _EXTRAS:
            extra = f"; install the extra: kvass[{_EXTRAS[error.name]}]"
        elif error.name == module and "." not in module:
            extra = f"; unknown scheme? ours are {', '.join(BUILT_IN_TIERS)}"
        elif "libibverbs" in str(error):
            extra = "; Mooncake's package needs it: install your system's libibverbs (libibverbs1)"
        raise _refused(text, f"{error}{extra}") from error
    except Exception as error:  # as above: a module may do anything
        raise _failed(text, error) from error
    if not callable(found):
        raise _refused(text, f"{module}:{name} cannot be called")
    return found
