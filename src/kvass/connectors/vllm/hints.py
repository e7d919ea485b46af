"""The hints of a request: the keys of its ``kv_transfer_params`` that kvass reads.

Law of this file: a hint changes how much is loaded, what is stored, for how long and who pays for
it, never what a key stands for. A bad value counts as absent.

``kv_transfer_params`` is a field of vLLM's HTTP requests (completions, chat completions, responses,
messages), and of ``SamplingParams.extra_args`` in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from kvass.connectors.vllm.content import text_digest
from kvass.engine.ttl import LONGEST_S, ttl_seconds
from kvass.messages import RequestContext
from kvass.types import is_tenant_name, session_tag

TENANT: Final = "kvass.tenant"
"""Names the tenant of the request: a text."""
MOST_TOKENS: Final = "max_offload_tokens"
"""How many first tokens may be stored: an integer, 0 or more. vLLM's own offloading has the same
key."""
SKIP_SAVE: Final = "lmcache.skip_save"
"""LMCache's key: ``true`` stores nothing."""
MOST_LOADED: Final = "kvass.max_load_tokens"
"""How many tokens may be loaded: an integer, 0 or more. It wins over the next key."""
VLLM_MOST_LOADED: Final = "max_load_tokens"
"""The key that newer versions of vLLM's own offloading have for it."""
SKIP_LOAD: Final = "lmcache.skip_load"
"""LMCache's key: ``true`` loads nothing."""

SESSION: Final = "kvass.session"
"""Names the request's session, the client's: a text. It wins over vLLM's ``session_id``."""
TTL: Final = "kvass.ttl"
"""0: the session ends with this request. Seconds up to a day, or a text like ``5m`` or ``1h``: its
rows are retained for so long."""
THEN: Final = "kvass.then"
"""When the session's next request comes, about: values as those of ``kvass.ttl``."""
MOST_NAME: Final = 1024
"""The most characters of a session's name."""

_Payload = Mapping[str, Any]
MOST_ACTIONS: Final = 64
"""How many actions of an envelope are read."""


def _retained(payload: _Payload) -> Any:
    """For how long an action of the type ``kv.retain`` retains a prompt's beginning: the longest
    time of what it asks for. None: for no time, or it cannot be read."""
    ranges = payload.get("directives", [payload])
    ranges = [r for r in ranges if isinstance(r, Mapping)] if isinstance(ranges, list) else []
    times = [
        r.get("ttl_seconds", r.get("duration"))
        for r in ranges
        if r.get("priority", 1) and not r.get("start")
    ]
    if None in times:
        return LONGEST_S
    numbers = [t for t in times if type(t) in (int, float) and t > 0]
    return min(max(numbers), LONGEST_S) if numbers else None


ACTIONS: Final[dict[tuple[str, str], tuple[str, Callable[[_Payload], Any]] | None]] = {
    ("kv.retain", "1"): (TTL, _retained),
    ("kv.deref", "1"): (TTL, lambda _: 0),
    ("kv.evict", "1"): (TTL, lambda p: 0 if p.get("include_current_request") is True else None),
    ("kv.prefetch", "1"): None,
}
"""The actions of ``kv_hints`` that others have begun to use, by type and first part of the version:
the key that means it, with its value. None: what waits is looked up early anyway."""

REPORT: Final = "kvass.report"
"""``true``: the answer says what kvass did for the request."""
FLAGS: Final = (None, True, False)


class Hints(msgspec.Struct, frozen=True):
    """What a request asks for. ``tenant``: empty without one. ``most_tokens``: how many first
    tokens may be stored; None: all. ``most_loaded``: how many tokens may be loaded; None: all.
    ``report``: whether the answer says what kvass did.
    ``session``: the session's name; empty without one. ``ends``: the session ends with the request.
    ``keep_s``: for how long its rows are retained; 0: they are not. ``then_s``: in how many seconds
    the session's next request comes; 0: it is not known.
    ``bad``: the keys whose values were ignored. ``unknown``: the types of actions of vLLM's
    ``kv_hints`` that were."""

    tenant: str = ""
    most_tokens: int | None = None
    most_loaded: int | None = None
    report: bool = False
    session: str = ""
    ends: bool = False
    keep_s: float = 0.0
    then_s: float = 0.0
    bad: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


NO_HINTS: Final = Hints()


def read_hints(params: Mapping[str, Any] | None, envelope: Any = None) -> Hints:
    """The hints in ``kv_transfer_params``, and in vLLM's ``kv_hints`` where the former say
    nothing."""
    if not params and envelope is None:
        return NO_HINTS
    asked, unknown = _actions(envelope)
    params = {**asked, **(params or {})}
    bad: list[str] = []
    tenant, report = params.get(TENANT), params.get(REPORT)
    if not (tenant is None or (isinstance(tenant, str) and is_tenant_name(tenant or "default"))):
        bad.append(TENANT)
        tenant = "other" if isinstance(tenant, str) else ""
    most = _most(params, (MOST_TOKENS,), SKIP_SAVE, bad)
    loaded = _most(params, (MOST_LOADED, VLLM_MOST_LOADED), SKIP_LOAD, bad)
    if report not in FLAGS:
        bad.append(REPORT)
    session, ttl = params.get(SESSION), params.get(TTL)
    if not (session is None or (isinstance(session, str) and 0 < len(session) <= MOST_NAME)):
        bad.append(SESSION)
        session = None
    seconds, then_s = ttl_seconds(ttl), ttl_seconds(params.get(THEN))
    if seconds == 0 and then_s:  # it ends: nothing comes then
        then_s = None
    for key, value in ((TTL, seconds), (THEN, then_s)):
        if value is None and params.get(key) is not None:
            bad.append(key)
    return Hints(
        tenant=tenant or "",
        most_tokens=most,
        most_loaded=loaded,
        report=report is True,
        session=session or "",
        ends=seconds == 0,
        keep_s=seconds or 0.0,
        then_s=then_s or 0.0,
        bad=tuple(bad),
        unknown=unknown,
    )


def _actions(envelope: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The keys and values that the actions of an envelope stand for, and the types of those that
    are not known or cannot be read."""
    asked, unknown = dict[str, Any](), list[str]()
    for action in () if envelope is None else envelope.actions[:MOST_ACTIONS]:
        known = action.action_type, action.action_version.partition(".")[0]
        if known not in ACTIONS:
            unknown.append(action.action_type[:64])
        elif (meaning := ACTIONS[known]) is not None:
            key, value = meaning[0], meaning[1](action.payload)
            if value is None:
                unknown.append(action.action_type)
            else:
                asked[key] = value
    return asked, tuple(unknown)


def _most(
    params: Mapping[str, Any], keys: tuple[str, ...], none: str, bad: list[str]
) -> int | None:
    """How many tokens the first of ``keys`` allows that has a value; 0 if the flag ``none`` is set.
    None: all. Adds to ``bad`` the keys whose values are ignored."""
    counts = [(key, params[key]) for key in keys if params.get(key) is not None]
    good = [value for _, value in counts if type(value) is int and value >= 0]
    bad += [key for key, value in counts if type(value) is not int or value < 0]
    if (flag := params.get(none)) not in FLAGS:
        bad.append(none)
    return 0 if flag is True else next(iter(good), None)


def request_context(request: Any, hints: Hints) -> RequestContext:
    """What vLLM's ``request`` says of itself. Without a hint its salt is its tenant; a salt may be
    long, so it is hashed. A request without a session has a tag of its own if it ends or comes
    back."""
    tenant, name = hints.tenant, hints.session or request.session_id
    if not tenant and request.cache_salt:
        tenant = f"salt-{text_digest(request.cache_salt).hex()[:16]}"
    tag = 0
    if name or hints.ends or hints.then_s:
        kind: Literal["session", "request"] = "session" if name else "request"
        tag = session_tag(name or str(request.request_id), tenant, kind)
    return RequestContext(tenant=tenant, session=tag, keep_s=hints.keep_s, then_s=hints.then_s)
