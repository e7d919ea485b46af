"""A fake Azure Blob Storage server (no real one can be installed with pip).

It follows the service's REST documentation for what an object tier uses: Put, Get, Get Properties,
List Blobs, and Blob Batch for deletes. It proves our side and the client library's; it cannot prove
that the real service behaves the same.
"""

from __future__ import annotations

import re
import threading
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CONTAINER: Final = "container"
ACCOUNT: Final = "tester"
PAGE_OF_NAMES: Final = 700
"""Names in a page of a listing (the service has 5000)."""
_MOST_IN_A_BATCH: Final = 256
_ABSENT: Final = {
    "BlobNotFound": "The specified blob does not exist.",
    "ContainerNotFound": "The specified container does not exist.",
}


class AzureServer:
    """A server with one account; ``endpoint`` is that of a tier URL."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, bytes]] = {CONTAINER: {}}
        """Container -> blob name -> bytes."""
        handler = type("Handler", (_Handler,), {"containers": self.containers})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def url(self, prefix: str, options: str = "", *, container: str = CONTAINER) -> str:
        """A tier URL."""
        where = f"endpoint={self.endpoint}&allow_http=yes&account={ACCOUNT}"
        return f"azure:{container}/{prefix}?{where}{options}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    containers: ClassVar[dict[str, dict[str, bytes]]]

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        container, _, name = unquote(url.path).lstrip("/").partition("/")
        asked = {key: values[0] for key, values in parse_qs(url.query).items()}
        if not self.headers.get("Authorization", "").startswith(f"SharedKey {ACCOUNT}:"):
            self._refuse(403, "AuthenticationFailed", "Server failed to authenticate the request.")
        elif container not in self.containers:
            self._refuse(404, "ContainerNotFound", _ABSENT["ContainerNotFound"])
        elif asked.get("comp") == "list":
            self._list(self.containers[container], asked)
        elif asked.get("comp") == "batch":
            self._batch(body.decode())
        else:
            self._one(self.containers[container], name, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_any  # noqa: N815

    def log_message(self, *_: object) -> None: ...

    def _one(self, blobs: dict[str, bytes], name: str, body: bytes) -> None:
        if self.command == "PUT":
            assert self.headers["x-ms-blob-type"] == "BlockBlob"
            blobs[name] = body
            self._answer(201, b"")
        elif (value := blobs.get(name)) is None:
            self._refuse(404, "BlobNotFound", _ABSENT["BlobNotFound"])
        else:
            self._answer(200, value, "application/octet-stream")

    def _list(self, blobs: dict[str, bytes], asked: dict[str, str]) -> None:
        after, prefix = asked.get("marker", ""), asked.get("prefix", "")
        names = sorted(name for name in list(blobs) if name.startswith(prefix) and name > after)
        some = names[:PAGE_OF_NAMES]
        when = formatdate(0, usegmt=True)
        found = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{when}"
            f"</Last-Modified><Etag>0x1</Etag><Content-Length>{len(blobs.get(name, b''))}"
            "</Content-Length><Content-Type>application/octet-stream</Content-Type></Properties>"
            "</Blob>"
            for name in some
        )
        marker = f"<NextMarker>{escape(some[-1])}</NextMarker>" if names[PAGE_OF_NAMES:] else ""
        text = f"<EnumerationResults><Blobs>{found}</Blobs>{marker or '<NextMarker />'}"
        self._answer(200, _xml(text + "</EnumerationResults>"), "application/xml")

    def _batch(self, body: str) -> None:
        parts = []
        deletes = re.findall(r"Content-ID: (\d+)\r\n\r\nDELETE /([^/ ]+)/(\S+) HTTP/1.1", body)
        assert 1 <= len(deletes) <= _MOST_IN_A_BATCH
        for number, container, name in deletes:
            blobs = self.containers.get(container)
            why = "ContainerNotFound" if blobs is None else "BlobNotFound"
            if blobs is not None and blobs.pop(unquote(name), None) is not None:
                said = "HTTP/1.1 202 Accepted\r\nx-ms-delete-type-permanent: true\r\n\r\n"
            else:
                told = _error(why, _ABSENT[why]).decode()
                said = f"HTTP/1.1 404 {_ABSENT[why]}\r\nx-ms-error-code: {why}\r\n"
                said += (
                    f"Content-Length: {len(told)}\r\nContent-Type: application/xml\r\n\r\n{told}"
                )
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts.append(f"--batchresponse_1\r\n{head}\r\n\r\n{said}\r\n")
        text = "".join(parts) + "--batchresponse_1--"
        self._answer(202, text.encode(), "multipart/mixed; boundary=batchresponse_1")

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(status, _error(code, message), "application/xml", code=code)

    def _answer(self, status: int, body: bytes, kind: str = "", code: str = "") -> None:
        self.send_response(status)
        headers: dict[str, Any] = {
            "Content-Length": len(body),
            "Content-Type": kind,
            "Last-Modified": formatdate(0, usegmt=True),
            "ETag": '"0x1"',
            "x-ms-error-code": code,
        }
        for name, value in headers.items():
            if value != "":
                self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _xml(text: str) -> bytes:
    return f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()


def _error(code: str, message: str) -> bytes:
    return _xml(f"<Error><Code>{code}</Code><Message>{message}</Message></Error>")
