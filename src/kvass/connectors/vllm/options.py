"""The connector's options: the ``kvass.*`` keys of vLLM's ``kv_connector_extra_config``.

An option that does not exist or cannot be used stops the engine's start with one line. Keys of
other prefixes are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvass.errors import ConfigError

KV_LAYOUTS: Final = ("blocks", "BLNHC", "BLHNC")
"""``blocks``: whichever of the others suits the device's kernels."""
GPU_COPIES: Final = ("batch", "single")
"""``single``: a call of the driver per run, for drivers that cannot take batches."""


class Options(msgspec.Struct, frozen=True, rename=lambda name: f"kvass.{name}"):
    """The ``kvass.*`` keys of ``kv_connector_extra_config``; without a socket, the default one."""

    socket: str = ""
    chunk_tokens: int = 0
    tag: str = ""
    model_id: str = ""
    kv_layout: str = ""
    fixed_weights: bool = False
    gpu: bool = False
    gpu_copies: str = "batch"
    global_media_ids: bool = False


def read_options(extra: Mapping[str, object]) -> Options:
    """The ``kvass.*`` keys of the engine's ``kv_connector_extra_config``.

    Raises :class:`ConfigError` for an unknown ``kvass.*`` key or a wrong type or value.
    """
    ours = {key: value for key, value in extra.items() if key.startswith("kvass")}
    known = {f.encode_name for f in msgspec.structs.fields(Options)}
    if unknown := sorted(ours.keys() - known):
        raise ConfigError(f"unknown option {unknown[0]!r}: use one of {', '.join(sorted(known))}")
    try:
        options = msgspec.convert(ours, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a kvass option of kv_connector_extra_config: {error}") from None
    if options.chunk_tokens < 0 or (options.chunk_tokens == 0 and "kvass.chunk_tokens" in ours):
        raise ConfigError(f"kvass.chunk_tokens is {options.chunk_tokens}: give a positive number")
    if not options.model_id and "kvass.model_id" in ours:
        raise ConfigError("kvass.model_id is empty: give the weights a name, or leave it out")
    for key, known_values in (("kv_layout", KV_LAYOUTS), ("gpu_copies", GPU_COPIES)):
        given = getattr(options, key)
        if given not in known_values and f"kvass.{key}" in ours:
            one_of = ", ".join(known_values)
            raise ConfigError(f"kvass.{key} is {given!r}: give one of {one_of}, or leave it out")
    return options
