"""A real S3 server of a test's own.

Law of this file: a process on a port of its own, ended by its pid; the program is moto's server,
which keeps everything in memory. Tests look into it over plain HTTP, not through the client that
they test.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))

BUCKET: Final = "bucket"
USER: Final = "tester"


class S3Server:
    """One bucket, ``BUCKET``; ``endpoint`` is what stands behind ``endpoint=`` in a tier URL."""

    def __init__(self) -> None:
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()  # or nobody would end it
            raise

    def url(self, prefix: str, options: str = "", *, bucket: str = BUCKET) -> str:
        """A tier URL."""
        return f"s3:{bucket}/{prefix}?endpoint={self.endpoint}&allow_http=yes{options}"

    def start(self) -> None:
        """Start (again), with an empty bucket, and wait until it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server never came up"
            time.sleep(0.02)

    def pause(self, stop: bool) -> None:
        """Make it answer nothing, or go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)

    def kill(self) -> None:
        """End it, and all it had."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        self.kill()

    # ------------------------------------------------------------ a look inside

    def names(self, prefix: str = "") -> list[str]:
        """Of the objects in the bucket."""
        query = urllib.parse.urlencode({"list-type": 2, "prefix": prefix})
        return re.findall("<Key>([^<]*)</Key>", self.ask("GET", f"{BUCKET}?{query}").decode())

    def get(self, name: str) -> bytes:
        return self.ask("GET", f"{BUCKET}/{name}")

    def put(self, name: str, value: bytes, **headers: str) -> None:
        self.ask("PUT", f"{BUCKET}/{name}", value, **headers)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        """One request, in the name of somebody whom only a guarded server would refuse."""
        request = urllib.request.Request(f"{self.endpoint}/{path}", data=body, method=method)
        usual = {"authorization": _SIGNED.format("s3"), "content_type": "application/octet-stream"}
        for name, value in (usual | headers).items():
            request.add_header(name.replace("_", "-"), value)
        with _DIRECT.open(request, timeout=60) as answer:
            got: bytes = answer.read()
        return got

    def guard(self) -> tuple[str, str]:
        """Ask for credentials from here on; the ones that it takes."""
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

    def _answers(self) -> bool:
        try:
            self.ask("PUT", BUCKET)
        except OSError:
            return False
        return True


_SIGNED: Final = (
    "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/{}/aws4_request, "
    "SignedHeaders=host, Signature=none"
)
_ALL: Final = """{"Version": "2012-10-17",
"Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}"""


@contextmanager
def credentials(key: str = "test", secret: str = "s3cr&t") -> Iterator[None]:
    """What a tier that is opened now will sign with; it reaches this machine by no proxy."""
    mine = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    mine |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    """Below what the system hands out by itself."""
    while True:
        port = random.randrange(22_000, 32_000)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
