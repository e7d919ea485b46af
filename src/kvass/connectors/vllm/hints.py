"""The hints of a request: the keys of its ``kv_transfer_params`` that kvass reads.

Law of this file: a hint changes what is stored and who pays for it, never what a key stands for. A
bad value counts as absent.

``kv_transfer_params`` is a field of vLLM's HTTP requests (completions, chat completions, responses,
messages), and of ``SamplingParams.extra_args`` in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvass.types import is_tenant_name

TENANT: Final = "kvass.tenant"
"""Names the tenant of the request: a text."""
MOST_TOKENS: Final = "max_offload_tokens"
"""How many first tokens may be stored: an integer, 0 or more. vLLM's own offloading has the same
key."""
SKIP_SAVE: Final = "lmcache.skip_save"
"""LMCache's key: ``true`` stores nothing."""


class Hints(msgspec.Struct, frozen=True):
    """What a request asks for. ``tenant``: empty without one. ``most_tokens``: how many first
    tokens may be stored; None: all. ``bad``: the keys whose values were ignored."""

    tenant: str = ""
    most_tokens: int | None = None
    bad: tuple[str, ...] = ()


NO_HINTS: Final = Hints()


def read_hints(params: Mapping[str, Any] | None) -> Hints:
    """The hints in ``kv_transfer_params``."""
    if not params:
        return NO_HINTS
    bad = []
    tenant = params.get(TENANT)
    if not isinstance(tenant, str):
        bad += [TENANT] if tenant is not None else []
        tenant = ""
    elif tenant and not is_tenant_name(tenant):
        bad.append(TENANT)
        tenant = "other"
    most = params.get(MOST_TOKENS)
    if most is not None and (type(most) is not int or most < 0):
        bad.append(MOST_TOKENS)
        most = None
    skip = params.get(SKIP_SAVE)
    if skip is True:
        most = 0
    elif skip not in (None, False):
        bad.append(SKIP_SAVE)
    return Hints(tenant, most, tuple(bad))
