"""The HTTP server: its connections, and how a request is read and answered.

Laws of this file:

- At most ``CONNECTIONS`` connections are open. Further ones are closed at once.
- A request must have arrived ``DEADLINE_S`` after its connection opened, however slowly it is sent.
- Every answer to a failed request is one JSON object, ``{"error": "one line"}``.

This is Python's own server, because the only clients are probes, scrapers and a few browsers.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvass._version import __version__
from kvass.config import Config
from kvass.errors import KvassError
from kvass.web.access import Denied, HttpAccess, Need
from kvass.web.routes import READS, STATIC, WRITES, HttpReply, error
from kvass.web.source import Source

CONNECTIONS: Final = 64
DEADLINE_S: Final = 10.0
BODY_BYTES: Final = 4 << 20
"""The most bytes of a request's body."""
_log = logging.getLogger("kvass.web")

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it (HTTP/1.0)."""

    server: WebServer
    server_version = f"kvass/{__version__}"
    sys_version = ""

    timeout = DEADLINE_S
    """Seconds of one read or write of the socket."""

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            pass  # the client is gone

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            pass  # the client is gone

    def do_GET(self) -> None:
        self._answer(self._read)

    def do_POST(self) -> None:
        """Answer a change."""
        self._answer(self._write)

    def _answer(self, answer: Callable[[], HttpReply]) -> None:
        try:
            result = answer()
        except Denied as denied:
            result = error(denied.status, denied.line)
        except ValueError as wrong:
            result = error(HTTPStatus.BAD_REQUEST, str(wrong))
        except KvassError as failure:
            result = error(HTTPStatus.SERVICE_UNAVAILABLE, str(failure))
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
        try:
            fields = json.loads(self._body() or b"{}")
        except (ValueError, RecursionError):
            raise ValueError("the body is no JSON") from None
        if not isinstance(fields, dict):
            raise ValueError("send a JSON object")
        return WRITES[path](self.server.source, fields)

    def _body(self) -> bytes:
        """The whole body of the request. Raises ``Denied``."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Denied(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if int(length) > BODY_BYTES:
            line = f"the body has more than {BODY_BYTES} bytes"
            raise Denied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, line)
        body = self.rfile.read(int(length))
        if len(body) < int(length):  # an empty body would mean: clear all rows
            raise Denied(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time")
        return body

    def _check(self, need: Need) -> None:
        """Raises ``Denied``."""
        self.server.access.check(need, self.headers)  # type: ignore[arg-type]

    def _refuse_path(self, path: str, others: dict[str, Any]) -> None:
        if path in others:
            method = "POST" if others is WRITES else "GET"
            raise Denied(HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}")
        paths = ", ".join(path for path in READS if path == "/" or path not in STATIC)
        raise Denied(HTTPStatus.NOT_FOUND, f"there is no such path; there are {paths}")

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
        """The answer to what Python's server refuses: a method, a long header, bad syntax."""
        status = HTTPStatus(code)
        self._reply(HttpReply(status, _json({"error": message or status.phrase})))

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: a scrape every few seconds would fill the log."""


def _json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


class WebServer(ThreadingHTTPServer):
    """The server on the socket ``listener``. Raises ``ConfigError`` for unusable token files.

    Each connection has a thread and serves one request.
    """

    daemon_threads = True

    def __init__(self, config: Config, listener: socket.socket) -> None:
        self.access = HttpAccess.of(config)
        self.source = Source(config.socket, config.daemon_uid)
        self._opened_s: dict[socket.socket, float] = {}
        """When each open connection was accepted (monotonic)."""
        self._lock = threading.Lock()
        """Guards ``_opened_s``. No socket in it is closed."""
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_port = listener.getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the server."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        return f"http://{host}:{self.server_port}"

    def run(self) -> None:
        """Serve until the process ends."""
        threading.Thread(target=self.source.sample_for_ever, daemon=True).start()
        self.serve_forever(poll_interval=1.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or close it if there are too many."""
        with self._lock:
            room = len(self._opened_s) < CONNECTIONS
            if room:
                self._opened_s[request] = time.monotonic()
        if not room:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, whether it was served or not."""
        with self._lock:
            self._opened_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End the reading of late requests. An answer can still be sent.

        Python's server calls this after each poll and each new connection.
        """
        latest_s = time.monotonic() - DEADLINE_S
        with self._lock:
            late = [each for each, since_s in self._opened_s.items() if since_s < latest_s]
            for connection in late:
                try:
                    connection.shutdown(socket.SHUT_RD)
                except OSError:
                    pass  # the client is gone

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a bug. The request's thread ends, the server goes on."""
        _log.exception("a request failed")
