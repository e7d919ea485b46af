"""The options of the daemon and of engines, and the daemon's four sources of their values.

Law of this file: ``Config`` alone names the options of the daemon, and ``EngineOptions`` those of
engines. Flags, ``KVASS_*`` environment names, YAML keys and ``--print-config`` are derived from the
fields, so they cannot disagree. An unknown name is an error in every source. A flag overrides the
environment, which overrides the file, which overrides the default.

An engine reads its options from the same environment names and the same file (``given``,
``engine/options.py``). So the daemon knows the names of ``ENGINE_OPTIONS``, and ignores them.
"""

from __future__ import annotations

import argparse
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NoReturn, get_args, get_origin

import msgspec
from msgspec import Meta, field

from kvass.arena.huge import HugePages, page_bytes
from kvass.arena.room import memory_bytes, physical_bytes
from kvass.errors import ConfigError
from kvass.tiers.options import DiskOptions
from kvass.tiers.url import read_tier_url, redacted, shown, tier_name
from kvass.types import DEFAULT_TENANT, MOST_S, PAGE, Quota, Timing, check_quotas_of
from kvass.types import Size as Size
from kvass.wire.channel import check_path
from kvass.wire.places import default_socket, service_socket

ENV_PREFIX: Final = "KVASS_"
ENGINE_PREFIX: Final = "kvass."
FILE_ENV: Final = ENV_PREFIX + "CONFIG"
_HIDDEN: Final = "# Secrets are hidden: put them where *** stands.\n"
_SERVICE: Final = re.compile(
    r"KVASS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)"
)
"""Variables that Kubernetes sets in every pod for a service whose name begins with kvass."""


def default_l1_size() -> Size:
    return Size(memory_bytes() // 4 >> 20 << 20)


CONNECTION: Final = ("socket", "daemon_uid")
"""The options that say which daemon a command connects to."""
Seconds = Annotated[float, Meta(gt=0, le=MOST_S)]
Uid = Annotated[int, Meta(ge=0, lt=2**32 - 1)]


class AnyEngineOptions(msgspec.Struct, frozen=True, kw_only=True, rename=ENGINE_PREFIX.__add__):
    """The options that every engine's connector has. An empty ``socket`` stands for the default
    sockets."""

    first_source: ClassVar[str]
    """Where the engine's own options stand."""
    page: ClassVar[str]
    """The document that lists the options."""

    socket: str = ""
    daemon_uid: Uid | None = None
    tag: str = ""
    model_id: Annotated[str, Meta(min_length=1)] = ""
    fixed_weights: bool = False
    """Nobody replaces weights without a call that the connector sees."""


class EngineOptions(AnyEngineOptions, frozen=True, kw_only=True, rename=ENGINE_PREFIX.__add__):
    """The options of vLLM's connector, and all that an engine reads in the environment and the
    file."""

    first_source: ClassVar[str] = "kv_connector_extra_config"
    page: ClassVar[str] = "docs/vllm.md"

    chunk_tokens: Annotated[int, Meta(ge=1)] = 0
    blend: str = ""
    blend_oracle: bool = False
    generated: Literal["auto", "on", "off"] = "auto"
    """Whether KV of generated tokens is stored. ``auto``: while later prompts repeat enough of it
    (``engine/answers.py``)."""
    gpu_stages: bool = False
    """Short pages may go through stages on the GPU (``transfer/staging.py``). Off until a GPU has
    run it."""
    kv_layout: Literal["blocks", "BLNHC", "BLHNC"] | None = None
    """``blocks`` chooses the one of the other two layouts that the device's kernels need."""
    global_media_ids: bool = False
    skip_slow_loads: bool = True
    """A hit is computed if that is faster than its load (``engine/worth.py``)."""
    window_interval: Annotated[int, Meta(ge=0)] | Literal["dense"] | None = None
    """Windows are stored at every so many tokens, and where hits are likely to end. 0 or ``dense``:
    at each chunk."""
    shadow: bool | Annotated[float, Meta(ge=0, le=1)] = False
    """Shadow mode (``engine/shadow.py``). A number is the share of hits that are compared."""
    early_lookups: Annotated[int, Meta(ge=0, le=1024)] = 8
    """For how many waiting requests promotions begin early (``engine/early_lookups.py``)."""
    tier_events: Annotated[float, Meta(ge=0)] = 0.0
    """Rows in tiers are announced in KV events, and asked for again after so many seconds
    (``engine/tier_rows.py``). 0: they are not announced."""
    verify: Annotated[int, Meta(ge=0)] | None = None
    """After the first copies, verify those of one in so many jobs (``engine/verifier.py``)."""
    several_machines: bool = False
    """The ranks may use other daemons than the scheduler, also if vLLM says nothing of several
    machines (``engine/nodes.py``)."""
    sync_load_ms: Annotated[float, Meta(ge=0)] = 2.0
    """The most milliseconds of copies inside a step (``engine/in_step.py``)."""


ENGINE_OPTIONS: Final = EngineOptions.__struct_fields__


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``kvass serve``. ``--help`` prints each description. The entry ``default`` of
    ``extra`` is the text that ``--help`` prints for a default that depends on the machine."""

    socket: Annotated[
        str,
        Meta(
            description="path of the unix socket",
            extra={
                "default": "kvass.sock in $XDG_RUNTIME_DIR, else in /run/kvass, else in kvass-UID "
                "in the temporary folder"
            },
        ),
    ] = ""
    daemon_uid: Annotated[
        Uid | None,
        Meta(
            description="for commands: the daemon's user, by name or id, where the folder "
            "of its socket does not show it"
        ),
    ] = None
    l1_size: Annotated[
        Size,
        Meta(
            description="memory for the cache (L1), resident from the start, like 64GiB",
            extra={
                "default": "a quarter of the memory that this process may use, or less if less is "
                "available"
            },
        ),
    ] = field(default_factory=default_l1_size)
    force_l1_size: Annotated[
        bool, Meta(description="take an l1_size that is more than the memory that is available")
    ] = False
    huge_pages: Annotated[
        HugePages,
        Meta(
            description="pages of L1: transparent (huge ones where the kernel has them), or 2MiB "
            "or 1GiB, which root must have reserved"
        ),
    ] = "transparent"
    numa: Annotated[
        str,
        Meta(
            description="NUMA nodes whose memory L1 takes, like 0 or 0,2-3; its pages are spread "
            "evenly over them",
            extra={"default": "all"},
        ),
    ] = ""
    arena: Annotated[
        str,
        Meta(
            description="folder of a tmpfs or hugetlbfs for L1, like /dev/shm/kvass: what is "
            "cached outlives the daemon"
        ),
    ] = ""
    allow_uid: Annotated[
        list[Uid],
        Meta(description="another user whose engines may connect, by name or id (repeatable)"),
    ] = []
    socket_group: Annotated[
        str, Meta(description="group whose members may connect; it becomes the group of the socket")
    ] = ""
    lease_s: Annotated[
        Seconds, Meta(description="seconds that an engine may take to read a hit")
    ] = Timing().lease_s
    reserve_s: Annotated[
        Seconds, Meta(description="seconds that an engine may take to write rows that it reserved")
    ] = Timing().reserve_s
    lost_engine_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="seconds before memory that a lost engine was writing is used again, if "
            "the end of its process cannot be seen; with GPUs give a second more for each 8GiB of "
            "--l1-size above 250GiB",
        ),
    ] = Timing().lost_engine_grace_s
    lookup_budget_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="milliseconds that a request may wait for lookups; for tiers and for other "
            "engines' stores it may wait longer, up to the time that computing takes",
        ),
    ] = Timing().lookup_budget_ms
    tier: Annotated[
        list[str],
        Meta(description="tier URL, like disk:/var/cache/kvass?capacity=100GiB (repeatable)"),
    ] = []
    flush: Annotated[
        Literal["write_through", "on_evict", "none"],
        Meta(description="when a row is stored in tiers: at once, when it is evicted, or never"),
    ] = "write_through"
    keep_loaded: Annotated[
        bool,
        Meta(description="keep rows that were loaded from a tier in L1 after they were read"),
    ] = True
    skip_slow_loads: Annotated[
        bool,
        Meta(description="do not load from a tier what the engine computes sooner"),
    ] = True
    quota: Annotated[
        list[str],
        Meta(description="a tenant's part of L1, as NAME=CAP:RESERVED (repeatable)"),
    ] = []
    keep_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="part of a tenant's share of L1 that its requests may have retained "
            "(kvass.ttl)",
        ),
    ] = 0.25
    stop_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="seconds to flush and, with arena, store after SIGTERM"),
    ] = 10.0
    record: Annotated[
        str,
        Meta(
            description="new file that records lookups and stores, without tokens, for kvass "
            "simulate"
        ),
    ] = ""
    record_size: Annotated[Size, Meta(description="size of that file at which recording ends")] = (
        Size(1 << 30)
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="lines of text, or a JSON object per line")
    ] = "text"
    http: Annotated[
        str, Meta(description="ADDRESS:PORT of metrics, health checks and dashboard")
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


BOOLS: Final = {"yes": True, "no": False}
_FIELDS: Final = {f.name: f for f in msgspec.structs.fields(Config)}
HTTP: Final = tuple(name for name in _FIELDS if name.startswith("http"))
"""The options of ``kvass serve`` that ``kvass web`` has, too."""


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises ``ConfigError`` instead of printing its usage and
    exiting."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        what, colon, words = message.partition("unrecognized arguments: ")
        if colon:  # other words may be the end of a tier's password that has a space in it
            flags = " ".join(re.findall(r"(?<!\S)--[a-z][a-z-]+", words))
            message = f"{what}{colon}{flags or 'words that are no options; quote what has a space'}"
        raise ConfigError(f"{redacted(message)}; see {self.prog} --help")


def add_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the flags of these options to ``parser``, or those of all options if none is named."""
    for name in names or _FIELDS:
        description = f"{_unwrap(name)[1].description} (default: {default_of(name)})"
        parser.add_argument(
            _flag(name),
            action="append" if _is_list(name) else "store",
            default=None,
            metavar=_metavar(name),
            help=description.replace("%", "%%"),
        )


def default_of(name: str) -> str:
    """The text for an option's default. It is the same on every machine."""
    if words := (_unwrap(name)[1].extra or {}).get("default"):
        return str(words)
    value = _FIELDS[name].default
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is msgspec.NODEFAULT:  # an empty list
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value or "none")


@dataclass(frozen=True)
class Given:
    """One option as the environment or the file gives it. ``typed``: the value comes from YAML, so
    it has a type."""

    key: str
    """Its name as it is written there."""
    name: str
    value: Any
    where: str
    """Where it is, for an error that quotes ``key``."""
    origin: str
    """Where it is, for an error about its value."""
    typed: bool

    def hint(self, names: Iterable[str]) -> str:
        """The end of an error about an unknown name: the known name that is most like it, or all
        ``names``."""
        near = get_close_matches(self.name, [*_FIELDS, *ENGINE_OPTIONS], 1, 0.75)
        if not near:
            return f"there are {', '.join(names)}"
        return f"did you mean {near[0] if self.typed else ENV_PREFIX + near[0].upper()}?"


def given(env: Mapping[str, str], file: str | None = None) -> Iterator[Given]:
    """The options of the file, then those of the environment, of a daemon or of an engine.

    ``file`` is its path; without it ``KVASS_CONFIG`` may name one. Variables that Kubernetes sets
    are left out. Raises ``ConfigError`` for a file that cannot be read.
    """
    path = file or env.get(FILE_ENV)
    for key, (value, line) in _read_yaml(path).items() if path else ():
        yield Given(str(key), str(key), value, f"in {path}:{line}", f"{path}:{line}: {key}", True)
    for key, text in env.items():
        if key.startswith(ENV_PREFIX) and key != FILE_ENV and not _SERVICE.fullmatch(key):
            name = key[len(ENV_PREFIX) :].lower()
            parts = [part for part in text.split(",") if part]
            value = parts if name in _FIELDS and _is_list(name) else text
            yield Given(key, name, value, "in the environment", key, False)


def disagreement(name: str, wins: Any, origin: str, loses: Any, other: str) -> str:
    """The line for an option that two sources give different values."""
    values = shown_value(name, wins), shown_value(name, loses)
    return f"option {name}: {values[0]} ({origin}) wins over {values[1]} ({other})"


def shown_value(name: str, value: Any) -> str:
    """The value of an option for people, without secrets."""
    urls = name == "tier" and isinstance(value, list)
    return repr([shown(str(url), accepted=False) for url in value] if urls else value)


def load(
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    file: str | None = None,
    overridden: Callable[[str], None] = lambda line: None,
    wanted: Collection[str] = (),
) -> Config:
    """The configuration from all sources. ``flags`` maps option names to texts; ``None`` means that
    the flag is absent. ``overridden`` is called with a line for each option of which two sources
    give different values.

    ``wanted``: the options that the caller uses; none: all. The values of others are not looked at,
    and mean nothing in the result: they are about the daemon's machine, and the caller's container
    may have less memory and other users.

    ``file`` is the path of a YAML file; ``KVASS_CONFIG`` may name one, too. Raises ``ConfigError``
    for an unknown name, and for a value of a wrong type or out of its domain. Its text is one line
    that names the source.
    """
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    """By option: the source of its value."""

    def take(name: str, value: Any, origin: str, strict: bool = False) -> None:
        if wanted and name not in wanted:
            return
        value = _convert(name, value, origin, strict)
        if name in values and values[name] != value:
            overridden(disagreement(name, value, origin, values[name], where[name]))
        values[name] = value
        where[name] = origin

    for one in given(env, file):
        if one.name not in _FIELDS:
            if one.name in ENGINE_OPTIONS:
                continue
            raise ConfigError(f"unknown option {one.key!r} {one.where}; {one.hint(_FIELDS)}")
        take(one.name, one.value, one.origin, one.typed)
    for name, value in flags.items():
        if value is not None:
            take(name, value, _flag(name))
    if wanted and "l1_size" not in wanted:
        values["l1_size"] = Size(0)  # its default would be computed
    config = Config(**values)
    if "socket" in where:
        check_path(config.socket)
    if not wanted or "l1_size" in wanted:
        _check_page(config, where)
    if not wanted:
        _check(config, where)
    return config


def _check_page(config: Config, where: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if L1 would be smaller than one of its pages."""
    page = page_bytes(config.huge_pages)
    if config.l1_size < page:
        size = f"{where.get('l1_size', 'l1_size')} {config.l1_size}"
        what = "one row" if page == PAGE else f"a page of {config.huge_pages}"
        raise ConfigError(f"{size}: smaller than {what}; use {Size(page)} or more")


def _check(config: Config, where: Mapping[str, str]) -> None:
    """Raise ``ConfigError`` if options contradict each other, or a value cannot be used here."""
    if (config.allow_uid or config.socket_group) and "socket" not in where:
        path = default_socket()
        if path != service_socket():
            raise ConfigError(
                f"allow_uid and socket_group need a socket that others can reach; {path} is "
                "in a folder of this user alone: choose another --socket"
            )
    reserved = page_bytes(config.huge_pages) > PAGE  # limits do not count such pages
    have = physical_bytes() if reserved else memory_bytes()
    if config.l1_size > have:
        size = f"{where.get('l1_size', 'l1_size')} {config.l1_size}"
        raise ConfigError(f"{size}: more than the {Size(have).rounded()} there are")
    try:
        for url in config.tier:
            read_tier_url(url)
    except ConfigError as error:
        raise ConfigError(f"{where['tier']}: {error}") from None
    check_quotas(config, where.get("quota", "quota"))


def quotas(config: Config) -> tuple[Quota, ...]:
    """The quotas of L1, parsed. Raises ``ValueError`` for one that is not valid."""
    return tuple(map(Quota.parse, config.quota))


def check_quotas(config: Config, where: str = "quota") -> None:
    """Raise ``ConfigError`` unless all quotas fit into ``l1_size``, and each tenant with a quota in
    a tier, except the default one, has a quota of L1, too."""
    try:
        every = quotas(config)
        check_quotas_of(every, "an l1_size", config.l1_size)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    known = {DEFAULT_TENANT} | {quota.tenant for quota in every}
    for url in config.tier:
        options = read_tier_url(url)[1]
        of_tier = options.quotas if isinstance(options, DiskOptions) else ()
        if unknown := sorted({quota.tenant for quota in of_tier} - known):
            raise ConfigError(
                f"tier {tier_name(url)}: quota of {unknown[0]}: it has none in L1: add "
                f"--quota {unknown[0]}=:0"
            )


def to_yaml(config: Config) -> str:
    """``config`` as the text of a file that ``load`` reads. The secrets of tiers are left out,
    because what is printed ends up in logs and bug reports."""
    import yaml

    values = {
        name: str(value) if isinstance(value, Size) else value
        for name, value in msgspec.structs.asdict(config).items()
    }
    values["tier"] = [shown(url) for url in config.tier]
    hidden = _HIDDEN if values["tier"] != config.tier else ""
    return hidden + str(yaml.safe_dump(values, sort_keys=False))


_FROM_YAML: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that YAML's constructors raise unchanged: `0x_`, `2001-13-45`, `!!bool x`, `!!timestamp
x`."""


def _read_yaml(path: str) -> dict[Any, tuple[Any, int]]:
    """The options of a file: by key its value, and the number of its line."""
    import yaml

    try:
        text = Path(path).read_text("utf-8")
        content = yaml.safe_load(text) or {}
        root = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (yaml.YAMLError, *_FROM_YAML) as error:
        mark = getattr(error, "problem_mark", None)  # the error quotes the line, with its secrets
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else type(error).__name__
        raise ConfigError(f"{path} is no YAML: {where}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: write options as `name: value` lines")
    lines: dict[str, int] = {}
    for key, _ in root.value if isinstance(root, yaml.MappingNode) else ():
        line = key.start_mark.line + 1
        if key.value in lines:  # YAML forbids it, but the loader takes the last one
            raise ConfigError(f"{path}:{line}: {key.value} stands there twice: keep one")
        lines[key.value] = line
    return {key: (value, lines.get(str(key), 1)) for key, value in content.items()}


def _convert(name: str, value: Any, origin: str, strict: bool = False) -> Any:
    """``value`` as the type of option ``name``. ``strict``: it comes from YAML, so text is not
    converted to another type."""
    kind = _unwrap(name)[0]
    if not strict and kind is bool:
        value = BOOLS.get(value, value)
    if name == "allow_uid" and isinstance(value, list):
        value = [user_id(user, origin) for user in value]
    if name == "numa" and type(value) is int:  # YAML: `numa: 0`
        value = str(value)
    if name == "daemon_uid":
        value = user_id(value, origin)
    choices = get_args(kind) if get_origin(kind) is Literal else [*BOOLS] if kind is bool else []
    if choices and not isinstance(value, bool) and value not in choices:
        raise ConfigError(
            f"{origin}: say one of {', '.join(choices)} (got {redacted(repr(value))})"
        )
    try:
        return msgspec.convert(
            value, _FIELDS[name].type, strict=strict, dec_hook=lambda _, raw: Size.parse(raw)
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error} (got {redacted(repr(value))})") from error


def user_id(user: Any, origin: str) -> Any:
    """The id of a user. A name is looked up; an id is returned as it is."""
    if not isinstance(user, str) or user.lstrip("-").isdecimal():
        return user
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise ConfigError(f"{origin}: there is no user {user!r} here: give the id") from None


def _unwrap(name: str) -> tuple[Any, Meta]:
    annotated = _FIELDS[name].type
    return annotated.__origin__, annotated.__metadata__[-1]


def _is_list(name: str) -> bool:
    return get_origin(_unwrap(name)[0]) is list


def _metavar(name: str) -> str:
    kind = _unwrap(name)[0]
    if kind is bool:
        return "|".join(BOOLS)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return name.rsplit("_", 1)[-1].upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
