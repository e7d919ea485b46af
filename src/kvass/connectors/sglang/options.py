"""The options of the backend: the ``kvass.*`` keys of SGLang's extra config, then the environment
(``KVASS_TAG`` is ``kvass.tag``), then the file that ``KVASS_CONFIG`` names.

Laws of this file:

- A wrong value is an error in every source. An unknown name is an error in the extra config alone,
  because a stray variable or an option of another engine must not switch kvass off.
- Daemons read the environment and the file, too. So these have only options that a daemon knows
  as an engine's (``config.ENGINE_OPTIONS``).
- It imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kvass.config import ENGINE_OPTIONS, Given, Uid, given, user_id
from kvass.engine.boundary import log
from kvass.errors import ConfigError

PREFIX: Final = "kvass."
_BOOLS: Final = {"yes": True, "no": False, "true": True, "false": False}


class StorageOptions(msgspec.Struct, frozen=True):
    """The options by their names without the prefix. ``docs/sglang.md`` lists them."""

    socket: str = ""
    daemon_uid: Uid | None = None
    tag: str = ""
    tenant: str = ""
    model_id: Annotated[str, Meta(min_length=1)] | None = None
    fixed_weights: bool = False
    """A flush of the engine's cache never means that its weights were replaced."""


NAMES: Final = StorageOptions.__struct_fields__


def read_options(extra: Mapping[str, Any], env: Mapping[str, str]) -> StorageOptions:
    """The options of one engine. Raises ``ConfigError`` for an unknown ``kvass.*`` key and for a
    wrong value."""
    shared = set(NAMES) & set(ENGINE_OPTIONS)
    values = {one.name: _text(one) for one in given(env) if one.name in shared and one.value != ""}
    for key, value in extra.items():
        name = key.removeprefix(PREFIX)
        if name != key and name not in NAMES:
            known = ", ".join(PREFIX + known for known in NAMES)
            raise ConfigError(f"unknown option {key!r} in the extra config: use one of {known}")
        if name != key:
            values[name] = value
        elif key in NAMES:
            log.warning("option %r is not kvass's: write it '%s%s'", key, PREFIX, key)
    try:
        return msgspec.convert(values, StorageOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"an option of kvass: {error}; docs/sglang.md lists their values"
        ) from None


def _text(one: Given) -> Any:
    """A value of the environment or the file as its option's type."""
    if one.name == "daemon_uid":
        return user_id(one.value, one.origin)
    is_bool = one.name == "fixed_weights" and isinstance(one.value, str)
    return _BOOLS.get(one.value, one.value) if is_bool else one.value
