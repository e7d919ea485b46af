"""The HTTP server: which path says what, and how much one client may ask of it.

Laws of this file:

- A connection has a place (``places.py``), which it loses if it sends too slowly.
- Every answer that is no success is one JSON object, ``{"error": "one line"}``.

Python's own server, since the only clients are probes, scrapers and a few browsers.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final, NamedTuple, cast

from kvass._version import __version__
from kvass.client.health import tier_state, tier_trouble, used_tiers
from kvass.config import Config
from kvass.errors import ConfigError, KvassError, Refused
from kvass.types import NO_CAP, Quota, Size
from kvass.web.access import Denied, HttpAccess, Need
from kvass.web.metrics import exposition
from kvass.web.places import DEADLINE_S, Place, Places
from kvass.web.source import Source

BODY_BYTES: Final = 4 << 20
_CLEAR_S: Final = 300.0
_TIER_CHARS: Final = 4096
"""No name of a tier is longer."""
_OF_TIER: Final = (
    *("tier", "place", "bytes", "capacity_bytes", "records", "tenants", "flush_queue_rows"),
    *("flush_queue_oldest_s", "storing_bytes", "loading_bytes", "load_bytes_s"),
    *("stored_rows", "loaded_rows", "store_failures"),
)
"""What ``/api/v1/tiers`` says of each, where it is known."""
_log = logging.getLogger("kvass.web")

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)


class HttpReply(NamedTuple):
    """``body``: bytes as they are, or what becomes JSON."""

    status: HTTPStatus
    body: Any
    kind: str = "application/json"


def _page(_: Source, _query: str) -> HttpReply:
    page = files("kvass.web").joinpath("dashboard.html").read_bytes()
    return HttpReply(HTTPStatus.OK, page, "text/html; charset=utf-8")


def _metrics(source: Source, _query: str) -> HttpReply:
    fields, _ = source.status()
    kind = "text/plain; version=0.0.4; charset=utf-8"
    return HttpReply(HTTPStatus.OK, exposition(fields), kind)


def _status(source: Source, _query: str) -> HttpReply:
    fields, trouble = source.status()
    if fields is None:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, trouble)
    return HttpReply(HTTPStatus.OK, fields)


def _history(source: Source, query: str) -> HttpReply:
    """``since=SECONDS``: only what is newer than that sample."""
    try:
        since = float(query.removeprefix("since=") or 0.0)
    except ValueError:
        raise ValueError("since: give the time of a sample, in seconds") from None
    return HttpReply(HTTPStatus.OK, source.history(since))


def _alive(source: Source, _query: str) -> HttpReply:
    """The daemon's loop answers."""
    fields, trouble = source.status()
    if fields is None:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, trouble)
    return HttpReply(HTTPStatus.OK, {"status": "ok"})


def _ready(source: Source, _query: str) -> HttpReply:
    """Alive, the arena populated, and every tier up."""
    fields, trouble = source.status()
    if fields is not None:
        if fields["l1_populated_bytes"] < fields["l1_capacity_bytes"]:
            trouble = "the arena is not populated yet"
        down = [tier["tier"] for tier in used_tiers(fields["tiers"]) if not tier.get("up")]
        trouble = f"tiers down: {', '.join(down)}" if down else trouble
    if trouble:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, trouble)
    return HttpReply(HTTPStatus.OK, {"status": "ready"})


def _clear(source: Source, asked: dict[str, Any]) -> HttpReply:
    """``{}``: all rows; ``{"namespace": HEX}``: those of one; ``{"tiers": true}``: tiers too."""
    everything = "namespace" not in asked
    namespace, tiers = _hex(asked, "namespace"), asked.pop("tiers", False)
    _nothing_else(asked)
    if not (namespace or everything):
        raise ValueError("namespace: it is empty; leave it out to clear all rows")
    if not isinstance(tiers, bool):
        raise ValueError("tiers: true or false")
    with source.another_client() as client:
        rows = client.clear(namespace, everything=everything, tiers=tiers, timeout_s=_CLEAR_S)
    return HttpReply(HTTPStatus.OK, {"rows": rows})


def _prefetch(source: Source, asked: dict[str, Any]) -> HttpReply:
    """``{"namespace": HEX, "digests": HEX, "width": 32}``: chunks of a prompt from tiers to L1."""
    namespace, digests = _hex(asked, "namespace"), _hex(asked, "digests")
    width = asked.pop("width", 32)
    _nothing_else(asked)
    if type(width) is not int or not 8 <= width <= 32:
        raise ValueError("width: give a number of bytes, 8 to 32")
    with source.another_client() as client:
        chunks = client.prefetch(namespace, digests, width)
    return HttpReply(HTTPStatus.OK, {"chunks": chunks})


def _quotas(source: Source, query: str) -> HttpReply:
    reply = _status(source, query)
    return reply._replace(body={"tenants": reply.body["tenants"]}) if reply.status == 200 else reply


def _tiers(source: Source, query: str) -> HttpReply:
    """In the order in which they are asked."""
    reply = _status(source, query)
    if reply.status != HTTPStatus.OK:
        return reply
    tiers = [
        {
            "state": tier_state(tier),
            "trouble": tier_trouble(tier),
            **{name: tier[name] for name in _OF_TIER if name in tier},
        }
        for tier in used_tiers(reply.body["tiers"])
    ]
    return reply._replace(body={"tiers": tiers})


def _empty_tier(source: Source, asked: dict[str, Any]) -> HttpReply:
    """``{"tier": NAME, "clear": true}``."""
    tier, clear = asked.pop("tier", ""), asked.pop("clear", False)
    _nothing_else(asked)
    if not isinstance(tier, str) or not 0 < len(tier) <= _TIER_CHARS:
        raise ValueError("tier: give the name of a tier, as in the list")
    if clear is not True:
        raise ValueError("clear: say true; a tier that is down is tried again by itself")
    try:
        with source.another_client() as client:
            client.empty_tier(tier, timeout_s=_CLEAR_S)
    except Refused as no:
        if no.code != "bad_value":
            raise
        raise ValueError(no.text) from no
    return HttpReply(HTTPStatus.OK, {"tier": tier})


def _set_quota(source: Source, asked: dict[str, Any]) -> HttpReply:
    """``{"tenant": NAME, "cap": "8GiB", "reserved": "2GiB"}``, or with ``"remove": true`` none."""
    tenant, remove = asked.pop("tenant", ""), asked.pop("remove", False)
    cap, reserved = asked.pop("cap", None), asked.pop("reserved", 0)
    _nothing_else(asked)
    if not isinstance(tenant, str) or not isinstance(remove, bool):
        raise ValueError("tenant: give a name; remove: true or false")
    cap_bytes = NO_CAP if cap is None else int(Size.parse(cap))
    quota = Quota(tenant, cap_bytes, int(Size.parse(reserved)))
    if wrong := quota.wrong():
        raise ValueError(wrong)
    try:
        with source.another_client() as client:
            client.set_quota(quota, remove=remove)
    except Refused as no:
        raise ValueError(no.text) from no
    return HttpReply(HTTPStatus.OK, {"tenant": tenant})


def _hex(asked: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(asked.pop(name, ""))
    except (ValueError, TypeError):
        raise ValueError(f"{name}: give hexadecimal digits") from None


def _nothing_else(asked: dict[str, Any]) -> None:
    if asked:
        raise ValueError(f"unknown field {next(iter(asked))[:40]!r}")


READS: Final[dict[str, tuple[Need, Callable[[Source, str], HttpReply]]]] = {
    "/": ("nothing", _page),
    "/healthz": ("nothing", _alive),
    "/readyz": ("nothing", _ready),
    "/metrics": ("read", _metrics),
    "/status": ("read", _status),
    "/api/v1/status": ("read", _status),
    "/api/v1/history": ("read", _history),
    "/api/v1/quotas": ("read", _quotas),
    "/api/v1/tiers": ("read", _tiers),
}
WRITES: Final[dict[str, Callable[[Source, dict[str, Any]], HttpReply]]] = {
    "/api/v1/clear": _clear,
    "/api/v1/prefetch": _prefetch,
    "/api/v1/quotas": _set_quota,
    "/api/v1/tiers": _empty_tier,
}


def _error(status: HTTPStatus, line: str) -> HttpReply:
    return HttpReply(status, {"error": line})


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it (HTTP/1.0)."""

    server: WebServer
    server_version = f"kvass/{__version__}"
    sys_version = ""

    timeout = DEADLINE_S

    @property
    def place(self) -> Place:
        """The connection's (``WebServer.process_request``)."""
        return cast(Place, self.client_address)

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            pass  # the client is gone

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ssl.SSLError):
            pass  # the client is gone, or speaks no TLS

    def do_GET(self) -> None:
        """Reads."""
        self._answer(self._read)

    def do_POST(self) -> None:
        """Changes."""
        self._answer(self._write)

    def _answer(self, answer: Callable[[], HttpReply]) -> None:
        try:
            result = answer()
        except Denied as denied:
            result = _error(denied.status, denied.line)
        except ValueError as error:
            result = _error(HTTPStatus.BAD_REQUEST, str(error))
        except KvassError as error:
            result = _error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        body = result.body
        self._reply(result._replace(body=body if isinstance(body, bytes) else _json(body)))

    def _read(self) -> HttpReply:
        path, _, query = self.path.partition("?")
        if path not in READS:
            self._refuse_path(path, WRITES)
        need, answer = READS[path]
        self._check(need)
        return answer(self.server.source, query)

    def _write(self) -> HttpReply:
        path = self.path.split("?", 1)[0]
        if path not in WRITES:
            self._refuse_path(path, READS)
        self._check("write")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Denied(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if int(length) > BODY_BYTES:
            line = f"the body has more than {BODY_BYTES} bytes"
            raise Denied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, line)
        try:
            asked = json.loads(self.rfile.read(int(length)) or b"{}")
        except (ValueError, RecursionError):
            raise ValueError("the body is no JSON") from None
        if not isinstance(asked, dict):
            raise ValueError("send a JSON object")
        return WRITES[path](self.server.source, asked)

    def _check(self, need: Need) -> None:
        """Raises ``Denied``."""
        self.server.access.check(need, self.headers)  # type: ignore[arg-type]
        self.place.trusted = need != "nothing"

    def _refuse_path(self, path: str, others: dict[str, Any]) -> None:
        if path in others:
            method = "POST" if others is WRITES else "GET"
            raise Denied(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}")
        raise Denied(HTTPStatus.NOT_FOUND, f"there is no such path; there are {', '.join(READS)}")

    def _reply(self, answer: HttpReply) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", _POLICY)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What Python's server refuses by itself: a method, a header too long, bad syntax."""
        status = HTTPStatus(code)
        self._reply(HttpReply(status, _json({"error": message or status.phrase})))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a scrape every few seconds says nothing."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class WebServer(ThreadingHTTPServer):
    """Serves on ``listener``. Raises ``ConfigError`` for files that cannot be used."""

    daemon_threads = True

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self.access = HttpAccess.of(config)
        self.source = Source(config.socket, config.daemon_uid)
        self.places = Places()
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_port = listener.getsockname()[1]
        self._tls = _tls(config) if self.access.tls else None

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        return f"http{'s' if self.access.tls else ''}://{host}:{self.server_port}"

    def run(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self.source.sample_for_ever, daemon=True).start()
        self.serve_forever(poll_interval=1.0)

    def service_actions(self) -> None:
        """Called once per poll, and after each new connection."""
        self.places.end_late()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is room. Its place takes the way of its address."""
        place = self.places.take(request, client_address)
        if place is None:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, place)
        except RuntimeError:  # no thread can be started now
            self.shutdown_request(request)
            self.places.leave(place)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """TLS begins here, so that one who sends nothing keeps nobody else waiting."""
        place: Place = client_address
        try:
            if self._tls is not None:
                request.settimeout(DEADLINE_S)
                request = self._tls.wrap_socket(
                    request, server_side=True, do_handshake_on_connect=False
                )
                place.connection = request
                request.do_handshake()
        except OSError:
            self.shutdown_request(request)
        else:
            super().process_request_thread(request, place)
        finally:
            self.places.leave(place)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A bug: the thread ends, the server goes on."""
        _log.exception("a request failed")


def _tls(config: Config) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.http_cert, config.http_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"http_cert {config.http_cert}: {error}") from error
    return context
