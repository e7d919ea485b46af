"""The sources of a connector's options: the engine's configuration, the environment and a file.

Laws of this file:

- The engine's configuration of the connector (``extra``) wins over the environment (``KVASS_TAG``
  is ``kvass.tag``), which wins over the file that ``KVASS_CONFIG`` names.
- A wrong value of an option is an error in every source. An unknown name is an error in ``extra``
  alone. In the environment and the file it is a line for the log, because a stray variable or an
  option of a newer daemon must not keep an engine from starting.
- Daemons read the environment and the file, too. So an engine reads there only the options that a
  daemon knows as an engine's (``config.ENGINE_OPTIONS``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from kvass.config import (
    BOOLS,
    ENGINE_OPTIONS,
    ENGINE_PREFIX,
    AnyEngineOptions,
    Config,
    Given,
    disagreement,
    given,
    user_id,
)
from kvass.engine.boundary import log
from kvass.errors import ConfigError

OneKind = TypeVar("OneKind", bound=AnyEngineOptions)


def read(extra: Mapping[str, Any], kind: type[OneKind], env: Mapping[str, str]) -> OneKind:
    """The options of one engine from all sources. Keys of ``extra``, which is the
    ``kind.first_source``, without the prefix ``kvass.`` are ignored. Raises ``ConfigError`` for an
    unknown ``kvass.*`` key and for a wrong value."""
    values, _ = gather(extra, kind, env)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    for key in extra:
        if ENGINE_PREFIX + key in known:
            log.warning("option %r is not kvass's: write it '%s%s'", key, ENGINE_PREFIX, key)
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"unknown option {unknown[0]!r}: use one of {', '.join(sorted(known))}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"an option in {kind.first_source}: {error}; {kind.page} lists their values"
        ) from None


def gather(
    extra: Mapping[str, Any], kind: type[AnyEngineOptions], env: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The options by their names with the prefix ``kvass.``, and lines for the log.

    ``kind``: the struct of all options. The values of ``extra`` are not checked here. Raises
    ``ConfigError`` for a wrong value of another source, and for a file that cannot be read.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    lines: list[str] = []

    def take(option: str, value: Any, origin: str) -> None:
        if option in values and values[option] != value:
            lines.append(disagreement(option, value, origin, values[option], where[option]))
        values[option], where[option] = value, origin

    for one in given(env):
        if one.name in types and one.name in ENGINE_OPTIONS:
            if one.value != "":  # an empty variable is as one that is not set
                take(ENGINE_PREFIX + one.name, _convert(one, types[one.name]), one.origin)
        elif one.name not in Config.__struct_fields__:
            hint = one.hint(ENGINE_OPTIONS)
            lines.append(f"unknown option {one.key!r} {one.where} is ignored; {hint}")
    for option, value in flatten(extra).items():
        if (option, value) != ("kvass.socket", ""):  # an empty socket is as none
            take(option, value, kind.first_source)
    return values, lines


def flatten(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The ``kvass.*`` keys of ``extra``.

    vLLM makes ``{"kvass": {"socket": X}}`` of the flag
    ``--kv-transfer-config.kv_connector_extra_config.kvass.socket X``. Both forms are read. Raises
    ``ConfigError`` for an option that is given in both, with different values.
    """
    found = {key: value for key, value in extra.items() if key.startswith("kvass")}
    if isinstance(nested := found.get("kvass"), Mapping):
        del found["kvass"]
        for name, value in nested.items():
            if found.setdefault(f"{ENGINE_PREFIX}{name}", value) != value:
                raise ConfigError(f"option kvass.{name} is given twice: keep one")
    return found


def _convert(one: Given, kind: Any) -> Any:
    """The value of ``one`` as the type ``kind``. Text of the environment is converted."""
    value = user_id(one.value, one.origin) if one.name == "daemon_uid" else one.value
    if (kind is bool or bool in get_args(kind)) and not one.typed:
        value = BOOLS.get(value, value)
    try:
        return msgspec.convert(value, kind, strict=one.typed)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{one.origin}: {error} (got {one.value!r})") from None
