"""A web server that stands before an object store, as a proxy or a network's login page does.

It passes each request on, and may answer some by itself: all of them, or those of ``answers``.
"""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, NamedTuple
from urllib.parse import urlsplit

LOGIN: Final = b"<!DOCTYPE html>\n<html><body><h1>Log in to the network</h1></body></html>"
OF_A_FILE: Final = {"ETag": '"5f3-1"', "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}


class Answer(NamedTuple):
    """An answer to a request. An answer to HEAD has no body."""

    status: int = 200
    body: bytes = LOGIN
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/html"),)


PAGE: Final = Answer()
"""What a login page answers to everything."""
FILE: Final = Answer(headers=(*PAGE.headers, *OF_A_FILE.items()))
"""The same page, from a web server that serves it as a file."""
MISSING: Final = Answer(404)
FORBIDDEN: Final = Answer(403)


def of_s3(status: int, code: str) -> Answer:
    """What S3 says."""
    text = f"<Error><Code>{code}</Code><Message>It is so.</Message></Error>"
    return Answer(status, text.encode(), (("Content-Type", "application/xml"),))


class Front:
    """A server in front of ``behind``, an endpoint. ``endpoint`` is that of a tier URL."""

    def __init__(self, behind: str = "") -> None:
        self.everything: Answer | None = None
        """What it answers to all requests; None: it passes them on."""
        self.answers: dict[tuple[str, str], Answer] = {}
        """Method and a part of the path -> what it answers to such requests."""
        handler = type("Handler", (_Handler,), {"front": self, "behind": urlsplit(behind).netloc})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client left
        self.port: int = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def url(self, prefix: str, options: str = "", scheme: str = "s3") -> str:
        """A tier URL."""
        return f"{scheme}:bucket/{prefix}?endpoint={self.endpoint}&allow_http=yes{options}"

    def answer_to(self, method: str, path: str) -> Answer | None:
        found = (one for (m, part), one in self.answers.items() if m == method and part in path)
        return self.everything or next(found, None)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    front: Front
    behind: str
    protocol_version = "HTTP/1.1"

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.front.answer_to(self.command, self.path) or self._passed_on(body)
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        if "Content-Length" not in dict(answer.headers):
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815

    def _passed_on(self, body: bytes) -> Answer:
        store = http.client.HTTPConnection(self.behind, timeout=60)
        store.request(self.command, self.path, body, dict(self.headers))
        got = store.getresponse()
        left_out = ("transfer-encoding", "connection")
        headers = [(n, v) for n, v in got.getheaders() if n.lower() not in left_out]
        answer = Answer(got.status, got.read(), tuple(headers))
        store.close()
        return answer

    def log_message(self, *_: object) -> None: ...
