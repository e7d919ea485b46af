"""The paths of the HTTP server: what a request to each of them does and what it answers.

Laws of this file: a body or a query is checked before the daemon is asked. What is wrong with it
raises ``ValueError`` with one line. What is answered without a token names no place of a socket or
a tier.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from kvass.client.health import tier_state, tier_trouble, used_tiers
from kvass.client.sessions import OPERATIONS
from kvass.errors import Refused, UnknownName
from kvass.messages import MOST_EXPLAINED
from kvass.types import DEFAULT_TENANT, NO_CAP, Quota, Size, is_tenant_name
from kvass.web.access import Need
from kvass.web.metrics import exposition
from kvass.web.source import Source

_CLEAR_S: Final = 300.0
"""Seconds in which the daemon and its tiers must have cleared."""
_NO_ANSWER: Final = "the daemon does not answer"
_TIER_CHARS: Final = 4096
"""The most characters of a tier's name."""
_TIER_FIELDS: Final = (
    *("tier", "place", "bytes", "capacity_bytes", "records", "tenants", "flush_queue_rows"),
    *("flush_queue_oldest_s", "storing_bytes", "loading_bytes", "load_bytes_s"),
    *("stored_rows", "loaded_rows", "store_failures", "rows_over_budget"),
    *("over_budget", "write_budget_bytes", "write_budget_left_bytes"),
)
"""The fields of a tier's status that ``/api/v1/tiers`` has, if the tier reports them."""


class HttpReply(NamedTuple):
    """An answer. A ``body`` of bytes is sent as it is, any other as JSON."""

    status: HTTPStatus
    body: Any
    kind: str = "application/json"


STATIC: Final = {
    "/": ("dashboard.html", "text/html"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/uplot.css": ("uplot.css", "text/css"),
    "/uplot.js": ("uplot.js", "text/javascript"),
}
"""The files of the dashboard by path, each with its type. uPlot is a library for charts, with a
licence of its own (``static/uplot.LICENSE``)."""


def _static(name: str, kind: str) -> Callable[[Source, str], HttpReply]:
    """Answers with the file ``name``, whatever is asked."""

    def answer(_: Source, _query: str) -> HttpReply:
        content = files("kvass.web").joinpath("static", name).read_bytes()
        return HttpReply(HTTPStatus.OK, content, f"{kind}; charset=utf-8")

    return answer


def _metrics(source: Source, _query: str) -> HttpReply:
    fields, _ = source.status()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return HttpReply(HTTPStatus.OK, exposition(fields), kind)


def _status(source: Source, _query: str) -> HttpReply:
    fields, trouble = source.status()
    if fields is None:
        return error(HTTPStatus.SERVICE_UNAVAILABLE, trouble)
    return HttpReply(HTTPStatus.OK, fields)


def _history(source: Source, query: str) -> HttpReply:
    """With ``since=SECONDS`` only the samples after that time."""
    try:
        since = float(query.removeprefix("since=") or 0.0)
    except ValueError:
        raise ValueError("since: give the time of a sample, in seconds") from None
    return HttpReply(HTTPStatus.OK, source.history(since))


def _alive(source: Source, _query: str) -> HttpReply:
    """200 if the daemon answers."""
    fields, _ = source.status()
    if fields is None:
        return error(HTTPStatus.SERVICE_UNAVAILABLE, _NO_ANSWER)
    return HttpReply(HTTPStatus.OK, {"status": "ok"})


def _ready(source: Source, _query: str) -> HttpReply:
    """200 if the daemon answers, the arena is populated and all tiers are up."""
    fields, _ = source.status()
    if fields is None:
        return error(HTTPStatus.SERVICE_UNAVAILABLE, _NO_ANSWER)
    up = [bool(tier.get("up")) for tier in used_tiers(fields["tiers"])]
    if not all(up):
        line = f"tiers down: {up.count(False)} of {len(up)}"
        return error(HTTPStatus.SERVICE_UNAVAILABLE, line)
    there, whole = fields["l1_populated_bytes"], fields["l1_capacity_bytes"]
    if there < whole:
        line = f"the arena is not populated yet: {100 * there // whole} % of it"
        return error(HTTPStatus.SERVICE_UNAVAILABLE, line)
    return HttpReply(HTTPStatus.OK, {"status": "ready"})


def _clear(source: Source, fields: dict[str, Any]) -> HttpReply:
    """Clear all rows; with ``{"namespace": HEX}`` those of one namespace, with ``{"model": NAME}``
    or ``{"tenant": NAME}`` those of a model or tenant. With ``{"tiers": true}`` all records of
    tiers too."""
    if "model" in fields or "tenant" in fields:
        return _clear_named(source, fields)
    everything = "namespace" not in fields
    namespace, tiers = _hex(fields, "namespace"), fields.pop("tiers", False)
    _no_more(fields)
    if not (namespace or everything):
        raise ValueError("namespace: it is empty; leave it out to clear all rows")
    if not isinstance(tiers, bool):
        raise ValueError("tiers: true or false")
    with source.new_client() as client:
        rows = client.clear(namespace, everything=everything, tiers=tiers, timeout_s=_CLEAR_S)
    return HttpReply(HTTPStatus.OK, {"rows": rows})


def _clear_named(source: Source, fields: dict[str, Any]) -> HttpReply:
    model, tenant = fields.pop("model", None), fields.pop("tenant", None)
    _no_more(fields)
    name = model if tenant is None else tenant
    if not isinstance(name, str) or (model is not None and tenant is not None):
        raise ValueError("model, tenant: give the name of one of them")
    try:
        with source.new_client() as client:
            clear = client.clear_model if tenant is None else client.clear_tenant
            rows = clear(name, timeout_s=_CLEAR_S)
    except UnknownName as error:
        raise ValueError(str(error)) from error
    except Refused as refused:
        if refused.code != "bad_value":
            raise
        raise ValueError(refused.text) from refused
    return HttpReply(HTTPStatus.OK, {"rows": rows})


def _session(source: Source, fields: dict[str, Any]) -> HttpReply:
    """Show, fetch or release a client's session: ``{"session": ID, "tenant": NAME, "do":
    "fetch"}``."""
    name = fields.pop("do", "show")
    operation = OPERATIONS.get(name) if isinstance(name, str) else None
    session, tenant = fields.pop("session", ""), fields.pop("tenant", "")
    _no_more(fields)
    if not isinstance(session, str) or not session:
        raise ValueError("session: give the name that its requests have")
    if not isinstance(tenant, str) or not is_tenant_name(tenant or DEFAULT_TENANT):
        raise ValueError("tenant: give the name that its requests have")
    if operation is None:
        raise ValueError(f"do: give one of {', '.join(OPERATIONS)}")
    with source.new_client() as client:
        return HttpReply(HTTPStatus.OK, operation.do(client, session, tenant))


def _prefetch(source: Source, fields: dict[str, Any]) -> HttpReply:
    """Load chunks of a prompt from tiers to L1: ``{"namespace": HEX, "digests": HEX, "width":
    32}``. ``width`` is the number of bytes per digest."""
    namespace, digests = _hex(fields, "namespace"), _hex(fields, "digests")
    width = fields.pop("width", 32)
    _no_more(fields)
    if type(width) is not int or not 8 <= width <= 32:
        raise ValueError("width: give a number of bytes, 8 to 32")
    with source.new_client() as client:
        chunks = client.prefetch(namespace, digests, width)
    return HttpReply(HTTPStatus.OK, {"chunks": chunks})


def _quotas(source: Source, query: str) -> HttpReply:
    reply = _status(source, query)
    return reply._replace(body={"tenants": reply.body["tenants"]}) if reply.status == 200 else reply


def _explain(source: Source, query: str) -> HttpReply:
    """The last lookups and why they did not match more: ``engine=``, ``request=``, ``limit=``."""
    fields = dict(parse_qsl(query, keep_blank_values=True))
    engine, request = fields.pop("engine", ""), fields.pop("request", "")
    limit = fields.pop("limit", "20")
    _no_more(fields)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5):
        limit = "0"
    if not 1 <= int(limit) <= MOST_EXPLAINED:
        raise ValueError(f"limit: give a number, 1 to {MOST_EXPLAINED}")
    with source.new_client() as client:
        return HttpReply(HTTPStatus.OK, {"lookups": client.explain(engine, request, int(limit))})


def _tiers(source: Source, query: str) -> HttpReply:
    """The tiers, in the order in which lookups ask them."""
    reply = _status(source, query)
    if reply.status != HTTPStatus.OK:
        return reply
    tiers = [
        {
            "state": tier_state(tier),
            "trouble": tier_trouble(tier),
            **{name: tier[name] for name in _TIER_FIELDS if name in tier},
        }
        for tier in used_tiers(reply.body["tiers"])
    ]
    return reply._replace(body={"tiers": tiers})


def _empty_tier(source: Source, fields: dict[str, Any]) -> HttpReply:
    """Delete all records of a tier: ``{"tier": NAME, "clear": true}``."""
    tier, clear = fields.pop("tier", ""), fields.pop("clear", False)
    _no_more(fields)
    if not isinstance(tier, str) or not 0 < len(tier) <= _TIER_CHARS:
        raise ValueError("tier: give the name of a tier, as in the list")
    if clear is not True:
        raise ValueError("clear: say true; a tier that is down is tried again by itself")
    try:
        with source.new_client() as client:
            client.empty_tier(tier, timeout_s=_CLEAR_S)
    except Refused as refused:
        if refused.code != "bad_value":
            raise
        raise ValueError(refused.text) from refused
    return HttpReply(HTTPStatus.OK, {"tier": tier})


def _set_quota(source: Source, fields: dict[str, Any]) -> HttpReply:
    """Set a tenant's quota: ``{"tenant": NAME, "cap": "8GiB", "reserved": "2GiB"}``. With
    ``"remove": true`` the tenant has none any more."""
    tenant, remove = fields.pop("tenant", ""), fields.pop("remove", False)
    cap, reserved = fields.pop("cap", None), fields.pop("reserved", 0)
    _no_more(fields)
    if not isinstance(tenant, str) or not isinstance(remove, bool):
        raise ValueError("tenant: give a name; remove: true or false")
    cap_bytes = NO_CAP if cap is None else int(Size.parse(cap))
    quota = Quota(tenant, cap_bytes, int(Size.parse(reserved)))
    if wrong := quota.wrong():
        raise ValueError(wrong)
    try:
        with source.new_client() as client:
            client.set_quota(quota, remove=remove)
    except Refused as refused:
        raise ValueError(refused.text) from refused
    return HttpReply(HTTPStatus.OK, {"tenant": tenant})


def _hex(fields: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(fields.pop(name, ""))
    except (ValueError, TypeError):
        raise ValueError(f"{name}: give hexadecimal digits") from None


def _no_more(fields: dict[str, Any]) -> None:
    if fields:
        raise ValueError(f"unknown field {next(iter(fields))[:40]!r}")


READS: Final[dict[str, tuple[Need, Callable[[Source, str], HttpReply]]]] = {
    **{path: ("nothing", _static(*file)) for path, file in STATIC.items()},
    "/healthz": ("nothing", _alive),
    "/readyz": ("nothing", _ready),
    "/metrics": ("read", _metrics),
    "/status": ("read", _status),
    "/api/v1/status": ("read", _status),
    "/api/v1/history": ("read", _history),
    "/api/v1/explain": ("read", _explain),
    "/api/v1/quotas": ("read", _quotas),
    "/api/v1/tiers": ("read", _tiers),
}
WRITES: Final[dict[str, Callable[[Source, dict[str, Any]], HttpReply]]] = {
    "/api/v1/clear": _clear,
    "/api/v1/prefetch": _prefetch,
    "/api/v1/session": _session,
    "/api/v1/quotas": _set_quota,
    "/api/v1/tiers": _empty_tier,
}


def error(status: HTTPStatus, line: str) -> HttpReply:
    """The answer to a request that failed: ``{"error": "one line"}``."""
    return HttpReply(status, {"error": line})
