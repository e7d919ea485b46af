"""A real S3 server: moto's, which keeps everything in memory.

Tests inspect it over plain HTTP, not through the client under test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from contextlib import AbstractContextManager
from typing import Final
from unittest import mock

from tests.support.servers.server import Server, free_port

_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))

BUCKET: Final = "bucket"
USER: Final = "tester"


class S3Server(Server):
    """A server with one bucket, ``BUCKET``; ``endpoint`` is that of a tier URL."""

    def __init__(self) -> None:
        self.port = free_port(22_000, 32_000)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        super().__init__()

    def url(self, prefix: str, options: str = "", *, bucket: str = BUCKET) -> str:
        """A tier URL."""
        return f"s3:{bucket}/{prefix}?endpoint={self.endpoint}&allow_http=yes{options}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def complaints(self) -> int:
        return subprocess.DEVNULL  # it logs every request

    def answers(self) -> bool:
        """Create the bucket."""
        try:
            self.ask("PUT", BUCKET)
        except OSError:
            return False
        return True

    # ------------------------------------------------------------ inspection

    def names(self, prefix: str = "") -> list[str]:
        """The names of the objects in the bucket."""
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        return re.findall("<Key>([^<]*)</Key>", self.ask("GET", f"{BUCKET}?{query}").decode())

    def get(self, name: str) -> bytes:
        return self.ask("GET", f"{BUCKET}/{name}")

    def put(self, name: str, value: bytes, **headers: str) -> None:
        self.ask("PUT", f"{BUCKET}/{name}", value, **headers)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """One request, with a signature that only a guarded server refuses."""
        request = urllib.request.Request(f"{self.endpoint}/{path}", data=body, method=method)
        usual = {"authorization": _SIGNED.format("s3"), "content_type": "application/octet-stream"}
        for name, value in (usual | headers).items():
            request.add_header(name.replace("_", "-"), value)
        with _DIRECT.open(request, timeout=60) as answer:
            got: bytes = answer.read()
        return got

    def guard(self) -> tuple[str, str]:
        """Check credentials from now on; returns those that are accepted."""
        self._iam("CreateUser")
        self._iam("PutUserPolicy", PolicyName="all", PolicyDocument=_ALL)
        answer = self._iam("CreateAccessKey")
        found = [
            re.findall(f"<{tag}>([^<]*)</{tag}>", answer)[0]
            for tag in ("AccessKeyId", "SecretAccessKey")
        ]
        self.ask("POST", "moto-api/reset-auth", b"0")
        return found[0], found[1]

    def _iam(self, action: str, **more: str) -> str:
        form = {"Action": action, "Version": "2010-05-08", "UserName": USER, **more}
        body = urllib.parse.urlencode(form).encode()
        kind = "application/x-www-form-urlencoded"
        signed = _SIGNED.format("iam")
        return self.ask("POST", "", body, authorization=signed, content_type=kind).decode()


_SIGNED: Final = (
    "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/{}/aws4_request, "
    "SignedHeaders=host, Signature=none"
)
_ALL: Final = """{"Version": "2012-10-17",
"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}"""


def credentials(key: str = "test", secret: str = "s3cr&t") -> AbstractContextManager[object]:
    """Set the environment's credentials for tiers opened here; use no proxy for 127.0.0.1."""
    mine = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    return mock.patch.dict(os.environ, mine, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
