"""The daemon's configuration: one model, four sources.

Law of this file: ``Config`` alone names the options. Flags, ``KVASS_*`` environment names, YAML
keys and ``--print-config`` are derived from its fields, so they cannot disagree; a name that is
none of them is an error wherever it stands. Flag beats environment beats file beats default.
"""

from __future__ import annotations

import argparse
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta, field

from kvass.errors import ConfigError, Unavailable
from kvass.tiers.url import parse_tier_url, shown
from kvass.types import MOST_QUOTAS, PAGE, Quota, Timing
from kvass.types import Size as Size
from kvass.wire.channel import check_path

ENV_PREFIX: Final = "KVASS_"
_FILE_ENV: Final = ENV_PREFIX + "CONFIG"
_HIDDEN: Final = "# Secrets are hidden: put them where *** stands.\n"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_CGROUP: Final = Path("/proc/self/cgroup")
_SERVICE: Final = re.compile(
    r"KVASS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""What Kubernetes sets in every pod for services whose names begin with kvass."""


def default_socket() -> str:
    """``$XDG_RUNTIME_DIR/kvass.sock``, else in a folder of this user in the temporary folder."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(runtime, "kvass.sock")
    import tempfile  # slow to import, seldom needed

    return os.path.join(tempfile.gettempdir(), f"kvass-{os.geteuid()}", "kvass.sock")


def check_folder(path: str) -> None:
    """Refuse the default ``path`` in the temporary folder unless its own folder is this user's.

    Anybody may have been first to make that folder, and listen there. Raises ``ConfigError`` if
    somebody was, ``Unavailable`` if nobody has yet; does nothing for any other path.
    """
    if os.environ.get("XDG_RUNTIME_DIR") or path != default_socket():
        return
    folder = os.path.dirname(path)
    try:
        owner = os.lstat(folder).st_uid
    except OSError as error:
        raise Unavailable(f"no daemon at {path}: {error.strerror}") from error
    if owner != os.geteuid():
        raise ConfigError(f"{folder} belongs to another user: choose another socket")


def memory_bytes() -> int:
    """What this process may use: physical memory, or less if a cgroup that it is in says so."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """Of this process's cgroup and those around it, of version 2 and 1."""
    try:
        lines = _CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "memory" not in names:
            continue
        root = _CGROUPS / "memory" if controllers else _CGROUPS
        file = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            try:
                yield int((folder / file).read_text())
            except (OSError, ValueError):  # not there, or "max"
                pass
            if folder == root:
                break


def _quarter_of_memory() -> Size:
    return Size(memory_bytes() // 4 >> 20 << 20)


Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Uid = Annotated[int, Meta(ge=0, lt=2**32 - 1)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kvass serve`` can be told; a description is what ``--help`` says."""

    socket: Annotated[str, Meta(description="path of the unix socket")] = field(
        default_factory=default_socket
    )
    l1_size: Annotated[
        Size, Meta(description="size of the arena; default: a quarter of memory")
    ] = field(default_factory=_quarter_of_memory)
    allow_uid: Annotated[
        list[Uid],
        Meta(description="another user whose engines may connect, by name or id (repeatable)"),
    ] = []
    socket_group: Annotated[
        str, Meta(description="group whose members may connect; the socket becomes theirs")
    ] = ""
    lease_s: Annotated[Seconds, Meta(description="seconds a reader may take")] = Timing().lease_s
    reserve_s: Annotated[Seconds, Meta(description="seconds a writer may take")] = (
        Timing().reserve_s
    )
    dma_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds that slots rest which a lost engine was writing, if the end of "
            "its process cannot be seen; then with GPUs a second more for each 8GiB of --l1-size "
            "above 250GiB",
        ),
    ] = Timing().dma_grace_s
    lookup_budget_ms: Annotated[
        float, Meta(ge=0, le=60_000, description="milliseconds an engine may wait for a lookup")
    ] = Timing().lookup_budget_ms
    tier: Annotated[
        list[str],
        Meta(description="tier URL, like disk:/var/cache/kvass?capacity=100GiB (repeatable)"),
    ] = []
    flush: Annotated[
        Literal["write_through", "on_evict", "none"],
        Meta(description="when tiers get a row: once it is stored, once it is evicted, or never"),
    ] = "write_through"
    retain_promoted: Annotated[
        bool, Meta(description="keep rows that came from a tier once their readers are done")
    ] = True
    weigh_loads: Annotated[
        bool, Meta(description="do not load from a tier what is computed sooner")
    ] = True
    quota: Annotated[
        list[str],
        Meta(description="what a tenant may have of L1, as NAME=CAP:RESERVED (repeatable)"),
    ] = []
    stop_s: Annotated[
        float, Meta(ge=0, le=86_400, description="seconds for what tiers still get at SIGTERM")
    ] = 10.0
    http: Annotated[
        str, Meta(description="ADDRESS:PORT of metrics, health checks and dashboard; default: none")
    ] = ""
    http_host: Annotated[
        list[str], Meta(description="a name under which browsers reach --http (repeatable)")
    ] = []
    http_token_file: Annotated[
        str, Meta(description="file of the token that allows everything over HTTP")
    ] = ""
    http_read_token_file: Annotated[
        str, Meta(description="file of a token that allows reading over HTTP")
    ] = ""
    http_cert: Annotated[str, Meta(description="file of the TLS certificates of --http")] = ""
    http_key: Annotated[str, Meta(description="file of the TLS key of --http")] = ""
    http_plain: Annotated[
        bool, Meta(description="allow tokens in plain text beyond this machine")
    ] = False


_BOOLS: Final = {"yes": True, "no": False}
_FIELDS: Final = {f.name: f for f in msgspec.structs.fields(Config)}


class Parser(argparse.ArgumentParser):
    """``argparse`` that raises ``ConfigError`` instead of printing a page and leaving."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{shown(message)}; see {self.prog} --help")


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Give ``parser`` the flags of these options (all of them if none is named)."""
    for name in names or _FIELDS:
        _, meta = _unwrap(name)
        parser.add_argument(
            _flag(name),
            action="append" if _is_list(name) else "store",
            default=None,
            metavar=_metavar(name),
            help=meta.description,
        )


def load(flags: Mapping[str, Any], env: Mapping[str, str], file: str | None = None) -> Config:
    """Merge the sources. ``flags`` maps option names to texts (``None``: not given).

    ``file``: a YAML file, also named by ``KVASS_CONFIG``. Raises ``ConfigError``, one line that
    names the source, for an unknown name, a value of a wrong type or out of its domain.
    """
    values: dict[str, Any] = {}
    path = file or env.get(_FILE_ENV)
    for key, value in _read_yaml(path).items() if path else ():
        name = _known(key, str(key), f"in {path}")
        values[name] = _convert(name, value, f"{path}: {key}", strict=True)
    for key, text in env.items():
        if key.startswith(ENV_PREFIX) and key != _FILE_ENV and not _SERVICE.fullmatch(key):
            name = _known(key[len(ENV_PREFIX) :].lower(), key, "in the environment")
            parts = [part for part in text.split(",") if part]
            values[name] = _convert(name, parts if _is_list(name) else text, key)
    for name, value in flags.items():
        if value is not None:
            values[name] = _convert(name, value, _flag(name))
    config = Config(**values)
    check_path(config.socket)
    if (config.allow_uid or config.socket_group) and "socket" not in values:
        raise ConfigError(
            f"allow_uid and socket_group need a socket that others can reach; {config.socket} is "
            "in a folder of this user alone: choose another --socket"
        )
    if config.l1_size < PAGE:
        raise ConfigError(f"l1_size {config.l1_size}: smaller than one row; use {PAGE} or more")
    if config.l1_size > (have := memory_bytes()):
        raise ConfigError(
            f"l1_size {config.l1_size}: more than the {have / 2**30:.1f}GiB there are"
        )
    for url in config.tier:
        parse_tier_url(url)
    _check_quotas(config)
    return config


def quotas(config: Config) -> tuple[Quota, ...]:
    """Raises ``ConfigError`` for a quota that nobody can have."""
    try:
        return tuple(map(Quota.parse, config.quota))
    except ValueError as error:
        raise ConfigError(f"quota: {error}") from error


def _check_quotas(config: Config) -> None:
    every = quotas(config)
    names = [quota.tenant for quota in every]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"quota: {min(twice)} has two: give one")
    reserved = Size(sum(quota.reserved_bytes for quota in every))
    if reserved > config.l1_size:
        raise ConfigError(f"quota: {reserved} are reserved of an l1_size of {config.l1_size}")
    if len(every) > MOST_QUOTAS:
        raise ConfigError(f"quota: {len(every)} tenants, there may be {MOST_QUOTAS}")


def to_yaml(config: Config) -> str:
    """``config`` as a file that ``load`` takes, but without the tiers' secrets: what is printed
    ends up in logs and reports."""
    import yaml

    values = {
        name: str(value) if isinstance(value, Size) else value
        for name, value in msgspec.structs.asdict(config).items()
    }
    values["tier"] = [shown(url) for url in config.tier]
    hidden = _HIDDEN if values["tier"] != config.tier else ""
    return hidden + str(yaml.safe_dump(values, sort_keys=False))


def _read_yaml(path: str) -> dict[Any, Any]:
    import yaml

    try:
        text = Path(path).read_text()
        content = yaml.safe_load(text) or {}
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = shown(" ".join(str(error).split()))  # it may quote the line
        raise ConfigError(f"{path} is no YAML: {said}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: write options as `name: value` lines")
    if content:  # YAML forbids a key that stands twice; its loader silently takes the last
        root = yaml.compose(text, yaml.SafeLoader)
        assert isinstance(root, yaml.MappingNode)
        keys = [key.value for key, _ in root.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ConfigError(f"{path}: {min(twice)} stands there twice: keep one")
    return content


def _known(name: object, shown: str, where: str) -> str:
    if name not in _FIELDS:
        names = ", ".join(_FIELDS)
        raise ConfigError(f"unknown option {shown!r} {where}; there are {names}")
    return str(name)


def _convert(name: str, value: Any, origin: str, strict: bool = False) -> Any:
    """``strict``: not from text."""
    kind = _unwrap(name)[0]
    if not strict and kind is bool:
        value = _BOOLS.get(value, value)
    if name == "allow_uid" and isinstance(value, list):
        value = [_uid(user) for user in value]
    choices = get_args(kind) if get_origin(kind) is Literal else [*_BOOLS] if kind is bool else []
    if choices and not isinstance(value, bool) and value not in choices:
        raise ConfigError(f"{origin}: say one of {', '.join(choices)} (got {shown(repr(value))})")
    try:
        return msgspec.convert(
            value, _FIELDS[name].type, strict=strict, dec_hook=lambda _, raw: Size.parse(raw)
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error} (got {shown(repr(value))})") from error


def _uid(user: Any) -> Any:
    """A user's name as the id that belongs to it; anything else as it is."""
    try:
        return user if str(user).isdecimal() else pwd.getpwnam(str(user)).pw_uid
    except KeyError:
        return user


def _unwrap(name: str) -> tuple[Any, Meta]:
    annotated = _FIELDS[name].type
    return annotated.__origin__, annotated.__metadata__[-1]


def _is_list(name: str) -> bool:
    return get_origin(_unwrap(name)[0]) is list


def _metavar(name: str) -> str:
    kind = _unwrap(name)[0]
    if kind is bool:
        return "|".join(_BOOLS)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return name.rsplit("_", 1)[-1].upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
