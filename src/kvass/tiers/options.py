"""The options of our own tiers: what may stand behind ``?`` in a tier URL.

Each kind of tier has a struct; its fields are the options, with their bounds and defaults.
``read_options`` converts the text of a URL. What docs/tiers.md says of an option is its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, inspect

from kvass.types import Size

Number = Annotated[int, Meta(ge=0, le=999_999_999)]
Word = Annotated[str, Meta(pattern=r"[0-9A-Za-z-]*", description="only 0-9 A-Z a-z and -")]

_LEAST_SEGMENT: Final = Size(16 << 20)
_LEAST_BOUNCE: Final = Size(1 << 20)


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all. ``__post_init__`` raises ``ValueError`` for options that contradict others."""


class DiskOptions(TierOptions, frozen=True, kw_only=True):
    """``disk:FOLDER?capacity=SIZE``."""

    capacity: Size
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    verify: Literal["always", "once"] = "always"
    direct: bool = True


class RedisOptions(TierOptions, frozen=True, kw_only=True):
    """``redis:HOST[:PORT]`` or ``redis:/path/of/socket``."""

    db: Number = 0
    prefix: Annotated[
        str, Meta(pattern="(?s).+", description="give one, or a clear would empty what is not ours")
    ] = "kvass:"
    ttl_s: Number = 0
    timeout_s: Annotated[int, Meta(ge=1, le=999_999_999)] = 5
    username: str = ""
    password: str = ""
    tls: bool = False
    cluster: bool = False

    def __post_init__(self) -> None:
        if self.cluster and self.db:
            raise ValueError("db: a cluster has none but 0")


class ObjectStoreOptions(TierOptions, frozen=True, kw_only=True):
    """``gcs:BUCKET[/PREFIX]``, and what the other object stores have, too."""

    endpoint: Annotated[
        str,
        Meta(
            pattern=r"(https?://[^\s/@?#]+(/[^\s@?#]*)?)?",
            description="write https://HOST[:PORT], without user or query",
        ),
    ] = ""
    allow_http: bool = False
    timeout_s: Annotated[int, Meta(ge=1, le=3600)] = 10
    connections: Annotated[int, Meta(ge=1, le=256)] = 32

    def __post_init__(self) -> None:
        if self.endpoint.startswith("http:") and not self.allow_http:
            raise ValueError("endpoint: http is not encrypted; allow_http=yes allows it")


class S3Options(ObjectStoreOptions, frozen=True, kw_only=True):
    """``s3:BUCKET[/PREFIX]``."""

    region: Word = ""


class AzureOptions(ObjectStoreOptions, frozen=True, kw_only=True):
    """``azure:CONTAINER[/PREFIX]``."""

    account: Word = ""


class MooncakeOptions(TierOptions, frozen=True, kw_only=True):
    """``mooncake:MASTER[:PORT]``."""

    metadata: Annotated[
        str, Meta(pattern="(?s).+", description="give a server's URL, or leave it out")
    ] = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment: Size = Size(0)
    """How much of this machine's memory holds everybody's records; 0: none."""
    bounce: Size = Size(64 << 20)
    hostname: str = ""
    """Under which others reach us; empty: our end of a connection to the master."""
    prefix: Annotated[
        str,
        Meta(pattern=r"[0-9A-Za-z._:/-]{1,100}", description="1 to 100 of 0-9 A-Z a-z . _ : / -"),
    ] = "kvass:"
    timeout_s: Annotated[int, Meta(ge=1, le=30)] = 3
    """The library returns after a minute whatever happens, and may still write to our memory then:
    its own limits must have ended the transfer by that time."""

    def __post_init__(self) -> None:
        if 0 < self.segment < _LEAST_SEGMENT:
            raise ValueError(f"segment: {self.segment} is less than {_LEAST_SEGMENT}")
        if self.bounce < _LEAST_BOUNCE:
            raise ValueError(f"bounce: {self.bounce} is less than {_LEAST_BOUNCE}")


AnyOptions = TypeVar("AnyOptions", bound=TierOptions)


def read_options(kind: type[AnyOptions], given: Mapping[str, str]) -> AnyOptions:
    """Options from the text of a URL. Raises ``ValueError``, one line that says what is allowed."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    known = f"its options: {', '.join(fields)}"
    for name in given:
        if name not in fields:
            raise ValueError(f"unknown option {name!r}; {known}")
    for field in fields.values():
        if field.required and field.name not in given:
            raise ValueError(f"{field.name} is missing; {known}")
    values = {}
    for name, text in given.items():
        try:
            values[name] = _value(inspect.type_info(fields[name].type), text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return kind(**values)


def _value(kind: inspect.Type, text: str) -> object:
    """The value that ``text`` stands for. Raises ``ValueError`` if it is none of that kind."""
    match kind:
        case inspect.IntType(ge=int(least), le=int(most)):
            if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
                raise ValueError(f"{text!r} is not {least}..{most}")
            return int(text)
        case inspect.BoolType():
            return _one_of(("yes", "no"), text) == "yes"
        case inspect.LiteralType(values=words):
            return _one_of(words, text)
        case inspect.CustomType(cls=cls) if cls is Size:
            return Size.parse(text)
        case inspect.Metadata(
            type=inspect.StrType(pattern=str(pattern)), extra_json_schema={"description": str(what)}
        ):
            if not re.fullmatch(pattern, text):
                raise ValueError(f"{text!r:.120}: {what}")
    return text


def _one_of(words: tuple[object, ...], text: str) -> str:
    if text not in words:
        raise ValueError(f"{text!r} is neither {' nor '.join(map(str, words))}")
    return text
