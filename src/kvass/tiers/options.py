"""The options of the built-in tiers, which follow the ``?`` in a tier URL.

Each kind of tier has a struct; its fields are the options, with their bounds and defaults.
``read_options`` converts the text of a URL. docs/tiers.md describes what each option does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from kvass.errors import ConfigError
from kvass.types import Quota, Size, check_quotas_of

YesNo = Literal["yes", "no"]
Number = Annotated[int, Meta(ge=0, le=999_999_999)]
Word = Annotated[str, Meta(pattern=r"^[0-9A-Za-z-]*\Z")]

ENDPOINT: Final = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
NO_ENDPOINT: Final = "write https://HOST[:PORT], without user or query"
_LEAST_SEGMENT: Final = Size(16 << 20)


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all options. ``__post_init__`` raises ``ValueError`` if options contradict each
    other."""


class RecordOptions(TierOptions, frozen=True, kw_only=True):
    """Base class of the options of tiers of records."""

    compress: Literal["lossless", "off", "auto"] = "auto"
    """``lossless``: records are compressed, bit by bit. ``auto``: where the store is slower than a
    core compresses, and only if a library for it is installed."""

    @property
    def over_rdma(self) -> bool:
        """Whether records go from memory to memory without a processor."""
        return False


class SealedOptions(RecordOptions, frozen=True, kw_only=True):
    """Base class of the options of tiers that can encrypt their records."""

    key_file: Annotated[str, Meta(min_length=1)] = ""
    """The file with the keys (``key_file``). Empty: records are not encrypted."""


class DiskOptions(SealedOptions, frozen=True, kw_only=True):
    """Options of ``disk:FOLDER?capacity=SIZE``."""

    capacity: Size
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    quota: str = ""
    """``NAME=CAP:RESERVED;...``: the quotas of tenants."""
    write: str = ""
    """``SIZE/day``: the write budget. Empty: none."""

    @property
    def day_bytes(self) -> int:
        """The write budget in bytes a day; 0: none. Raises ``ValueError``."""
        if not self.write:
            return 0
        size, _, per = self.write.partition("/")
        if per != "day" or not (day := _size_or_zero(size)):
            raise ValueError(f"write: {self.write!r:.120}: write it like 2TB/day")
        return day

    @property
    def quotas(self) -> tuple[Quota, ...]:
        return tuple(Quota.parse(text) for text in self.quota.split(";") if text)

    def __post_init__(self) -> None:
        check_quotas_of(self.quotas, "a capacity", self.capacity)
        _ = self.day_bytes


class RedisOptions(SealedOptions, frozen=True, kw_only=True):
    """Options of ``redis:HOST[:PORT]`` and ``redis:/path/of/socket``."""

    db: Number = 0
    prefix: Annotated[str, Meta(min_length=1)] = "kvass:"
    """The prefix of all names. It is not empty, because a clear deletes all names with it."""
    ttl_s: Number = 0
    timeout_s: Annotated[int, Meta(ge=1, le=999_999_999)] = 5
    username: str = ""
    password: str = ""
    tls: YesNo = "no"
    cluster: YesNo = "no"

    def __post_init__(self) -> None:
        if self.cluster == "yes" and self.db:
            raise ValueError("db: a cluster has none but 0")


class ObjectStoreOptions(SealedOptions, frozen=True, kw_only=True):
    """Options of ``gcs:BUCKET[/PREFIX]``, and base class of the options of all object stores."""

    endpoint: str = ""
    allow_http: YesNo = "no"
    timeout_s: Annotated[int, Meta(ge=1, le=3600)] = 10
    connections: Annotated[int, Meta(ge=1, le=256)] = 32

    def __post_init__(self) -> None:
        if self.endpoint and not ENDPOINT.fullmatch(self.endpoint):
            raise ValueError(f"endpoint: {NO_ENDPOINT}")
        if self.endpoint.startswith("http:") and self.allow_http == "no":
            raise ValueError("endpoint: http is not encrypted; allow_http=yes allows it")


class S3Options(ObjectStoreOptions, frozen=True, kw_only=True):
    """Options of ``s3:BUCKET[/PREFIX]``."""

    region: Word = ""


class AzureOptions(ObjectStoreOptions, frozen=True, kw_only=True):
    """Options of ``azure:CONTAINER[/PREFIX]``."""

    account: Word = ""


class MooncakeOptions(RecordOptions, frozen=True, kw_only=True):
    """Options of ``mooncake:MASTER[:PORT]``."""

    metadata: Annotated[str, Meta(min_length=1)] = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str = ""
    segment: Size = Size(0)
    """Mooncake's ``global_segment_size``: bytes of this machine's memory that hold records of all
    clients. 0: none."""
    hostname: str = ""
    """The name under which other clients reach this one. Empty: the local address of a connection
    to the master."""
    prefix: Annotated[str, Meta(pattern=r"^[0-9A-Za-z._:/-]{1,100}\Z")] = "kvass:"
    timeout_s: Annotated[int, Meta(ge=1, le=30)] = 3
    """Seconds for each of the library's own timeouts. At most 30, so that they end every transfer
    before the library gives up on it after a minute: after that it may still write to our
    memory."""

    def __post_init__(self) -> None:
        if 0 < self.segment < _LEAST_SEGMENT:
            raise ValueError(f"segment: {self.segment} is less than {_LEAST_SEGMENT}")

    @property
    def over_rdma(self) -> bool:
        return self.protocol == "rdma"


AnyOptions = TypeVar("AnyOptions", bound=TierOptions)


SECRET_NAME: Final = r"\w*(?:pass|pwd|secret|token|key|credential|auth)\w*"
ESCAPES: Final = "write %26 for an & in a value, and %3F for a ?"


def is_secret(name: str) -> bool:
    """Whether an option, or a variable of the environment, of this name has a secret."""
    return name != "key_file" and bool(re.fullmatch(SECRET_NAME, name, re.IGNORECASE))


def read_options(kind: type[AnyOptions], texts: Mapping[str, str]) -> AnyOptions:
    """Convert the options of a URL, in its order. Raises ``ValueError`` with one line that says
    what is allowed. About what stands behind a secret it quotes nothing: it may be the secret's
    end."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    own = [name for name in fields if name not in SealedOptions.__struct_fields__]
    known = f"its options: {', '.join([*own, *(name for name in fields if name not in own)])}"
    values: dict[str, Any] = {}
    secret = "a login" if any("@" in text for text in texts.values()) else ""
    for name, text in texts.items():
        try:
            values[name] = _value(kind, name, text, known)
        except ValueError as error:
            if not secret:
                raise
            which = name if name in fields else "what follows"
            raise ValueError(f"beside {secret}, {which} is wrong; {ESCAPES}; {known}") from error
        secret = secret or (name if is_secret(name) else "")
    for name, field in fields.items():
        if field.required and name not in values:
            raise ValueError(f"{name} is missing; {known}")
    return kind(**values)


def _value(kind: type[TierOptions], name: str, text: str, known: str) -> Any:
    if name == "quota" and kind is not DiskOptions:
        raise ValueError(
            "quota: only the capacity of a disk tier can be divided: what such a store evicts, if "
            "anything, is its own choice"
        )
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    if name not in fields:
        raise ValueError(f"unknown option {name!r}; {known}")
    try:
        return msgspec.convert(text, fields[name].type, strict=False, dec_hook=_size)
    except msgspec.ValidationError as error:
        choices = [one for one in get_args(fields[name].type) if isinstance(one, str)]
        why = f"say one of {', '.join(choices)}" if choices else error
        raise ValueError(f"{name}: {text!r:.120}: {why}") from error


def host_and_port(scheme: str, where: str, port: int) -> tuple[str, int]:
    """Split ``HOST[:PORT]`` of a URL. ``port`` is the default. Raises ``ConfigError``."""
    host, _, port_text = where.rpartition(":") if ":" in where else (where, "", str(port))
    if not host or not port_text.isdecimal() or not 0 < int(port_text) < 65536:
        raise ConfigError(f"{scheme}: no host, or no port: write {scheme}:HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port_text)


def _size_or_zero(text: str) -> int:
    try:
        return int(Size.parse(text))  # a plain number, as it is part of the tier's report
    except ValueError:
        return 0


def _size(_: type, text: object) -> Size:
    """Decode a ``Size``, the only type of an option that msgspec does not know."""
    return Size.parse(text)
