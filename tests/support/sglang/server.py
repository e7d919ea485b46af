"""A real SGLang server on the CPU, in processes of its own: ``python -m sglang.launch_server``.

The version is a folder ``sglang-VERSION`` beside ``sglang-deps`` in the folder of overlays
(requirements/sglang.sh). ``shims`` has what a machine without a GPU lacks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec

START_S: Final = 480.0
"""On two cores with a load of 30 a start took longer than 240 s."""
ANSWER_S: Final = 120.0
"""How long an answer may take before a test fails: a request must never stay without one."""
SHIMS: Final = Path(__file__).parent / "shims"
# The share of memory is large, because SGLang also subtracts from it what other processes take
# meanwhile. The tokens bound what is used.
FLAGS: Final = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--grammar-backend": "none",
    "--dtype": "bfloat16",
    "--mem-fraction-static": "0.4",
    "--max-total-tokens": "8192",
    "--hicache-ratio": "2.0",
    "--hicache-write-policy": "write_through",
    "--hicache-storage-prefetch-policy": "wait_complete",
    "--hicache-io-backend": "direct",
    "--hicache-mem-layout": "page_first_direct",
    "--log-level": "info",
}


class Answer(msgspec.Struct, frozen=True):
    """``stored``: prompt tokens that came from the storage backend. ``logprobs``: of the tokens, if
    the request has ``return_logprob``."""

    tokens: list[int]
    cached: int
    stored: int
    logprobs: list[float] = []


def overlays() -> Path | None:
    """The folder with SGLang's versions; None where it was not installed."""
    found = os.environ.get("SGLANG_OVERLAYS", "")
    return Path(found).absolute() if found else None


def environment(version: str) -> dict[str, str]:
    """What a process of this version runs with; "": of the one that is installed."""
    if not version:
        return dict(os.environ)
    folder = overlays()
    assert folder is not None
    first = [SHIMS, folder / f"sglang-{version}", folder / "sglang-deps"]
    own = {key: value for key, value in os.environ.items() if not key.startswith("KVASS")}
    return own | {
        "PYTHONPATH": ":".join(map(str, [*first, Path.cwd()])),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


class Server:
    """Use it as a context: it ends its processes. ``page``: tokens of a page. ``more``: further
    flags, and ``flags`` those in the place of ``FLAGS``. ``extra``: the extra config of the storage
    backend; None: none is named.
    ``own_session``: False leaves its processes in the group of this process, which must end soon,
    too."""

    def __init__(
        self,
        version: str,
        model: Path,
        log: Path,
        *,
        page: int = 64,
        more: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        own_session: bool = True,
        flags: Mapping[str, str] = FLAGS,
    ) -> None:
        self.log = log
        self._own_session = own_session
        self.headers = {"content-type": "application/json"}
        self.port = _free_port()
        all_flags = [*flags.items(), ("--page-size", str(page)), ("--port", str(self.port))]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += [part for flag in all_flags for part in flag]
        command += ["--skip-tokenizer-init", "--enable-cache-report", "--skip-server-warmup"]
        command += ["--enable-hierarchical-cache", *more]
        more_env = dict(env or {})
        if "--tp-size" in more:  # SGLang wants to know the cores of each rank
            more_env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
        if extra is not None:
            command += ["--hicache-storage-backend", "dynamic"]
            command += ["--hicache-storage-backend-extra-config", json.dumps(dict(extra))]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment(version) | more_env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the server and all processes that it started."""
        try:
            if self._own_session:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:  # SGLang's processes end with their parent
                self.process.kill()
        except ProcessLookupError:
            pass
        self.process.wait()

    def wait_ready(self) -> Self:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            try:
                with urllib.request.urlopen(self._url("/model_info"), timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.tail()}")

    def generate(self, tokens: Sequence[int], count: int = 8, **request: Any) -> Answer:
        """One greedy request."""
        params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": params, **request}
        found = json.loads(self.post("/generate", body))
        meta = found["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        logprobs = [each[0] for each in meta.get("output_token_logprobs") or ()]
        stored = details.get("storage") or 0
        return Answer(found["output_ids"], meta["cached_tokens"], stored, logprobs)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self._url(path), data, self.headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                answer: bytes = reply.read()
                return answer
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error}: {error.read()!r}\n{self.tail()}") from None
        except OSError as error:
            raise AssertionError(f"{path}: no answer: {error}\n{self.tail()}") from None

    def flush(self) -> None:
        """Empty SGLang's own cache; tried again while a request is still being ended."""
        for _ in range(50):
            try:
                self.post("/flush_cache")
                return
            except AssertionError as error:
                if "400" not in str(error):
                    raise
                time.sleep(0.2)
        raise AssertionError(f"the cache could not be flushed:\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.text().splitlines()[-lines:])

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
