"""The sources of the connector's options: vLLM's configuration, the environment and a file.

Laws of this file:

- The connector's extra config wins over the environment (``KVASS_TAG`` is ``kvass.tag``), which
  wins over the file that ``KVASS_CONFIG`` names.
- A wrong value of an option is an error in every source. An unknown name is an error in the extra
  config alone. In the environment and the file it is a line for the log, because a stray variable
  or an option of a newer daemon must not keep an engine from starting.
- It imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec

from kvass.config import ENGINE_OPTIONS, Config, Given, disagreement, given, user_id
from kvass.errors import ConfigError

_PREFIX: Final = "kvass."
_BOOLS: Final = {"yes": True, "no": False}


def gather(
    extra: Mapping[str, Any], kind: type[msgspec.Struct], env: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """The options by their names with the prefix ``kvass.``, and lines for the log.

    ``extra``: the connector's extra config. ``kind``: the struct of all options. The values of the
    extra config are not checked here. Raises ``ConfigError`` for a wrong value of another source,
    and for a file that cannot be read.
    """
    types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    lines: list[str] = []

    def take(option: str, value: Any, origin: str) -> None:
        if option in values and values[option] != value:
            lines.append(disagreement(option, value, origin, values[option], where[option]))
        values[option], where[option] = value, origin

    for one in given(env):
        option = _PREFIX + one.name
        if option in types:
            if one.value != "":  # an empty variable is as one that is not set
                take(option, _convert(one, types[option]), one.origin)
        elif one.name not in Config.__struct_fields__:
            hint = one.hint(ENGINE_OPTIONS)
            lines.append(f"unknown option {one.key!r} {one.where} is ignored; {hint}")
    for option, value in flatten(extra).items():
        if (option, value) != ("kvass.socket", ""):  # an empty socket is as none
            take(option, value, "kv_connector_extra_config")
    return values, lines


def flatten(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The ``kvass.*`` keys of the connector's extra config.

    vLLM makes ``{"kvass": {"socket": X}}`` of the flag
    ``--kv-transfer-config.kv_connector_extra_config.kvass.socket X``. Both forms are read. Raises
    ``ConfigError`` for an option that is given in both, with different values.
    """
    found = {key: value for key, value in extra.items() if key.startswith("kvass")}
    if isinstance(nested := found.get("kvass"), Mapping):
        del found["kvass"]
        for name, value in nested.items():
            if found.setdefault(f"{_PREFIX}{name}", value) != value:
                raise ConfigError(
                    f"option kvass.{name} is in kv_connector_extra_config twice: keep one"
                )
    return found


def _convert(one: Given, kind: Any) -> Any:
    """The value of ``one`` as the type ``kind``. Text of the environment is converted."""
    value = user_id(one.value, one.origin) if one.name == "daemon_uid" else one.value
    if (kind is bool or bool in get_args(kind)) and not one.typed:
        value = _BOOLS.get(value, value)
    try:
        return msgspec.convert(value, kind, strict=one.typed)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{one.origin}: {error} (got {one.value!r})") from None
