"""vLLM's API server in a fork of ``template``. Its engine and its rank are forks, too.

As a user starts it, each of the three imports vLLM, which takes 30 s of a core. ``forked`` takes
the place of the function of ``examples.serving`` that starts a process.
"""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.support.vllm.process import ENVIRONMENT, EngineProcess

API_SERVER: Final = "vllm.entrypoints.openai.api_server"


@contextmanager
def forked(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A server in a process group of its own, ended at the end."""
    assert EngineProcess.template is not None
    assert command[0] == API_SERVER
    env = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **environment}
    with log.open("wb") as file:
        server = EngineProcess.template.fork([__name__, *command[1:]], env, file.fileno())
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has no group yet, or has ended
            os.killpg(server.pid, signal.SIGKILL)
        server.send_signal(signal.SIGKILL)
        server.wait(10)
        server.stdin.close()
        server.stdout.close()


def main() -> None:
    """In the fork: what ``python -m`` of the API server does."""
    os.setsid()
    os.dup2(2, 1)
    from vllm import logger

    from tests.support.vllm import instruments

    logger._configure_vllm_root_logger()  # the template had another level
    instruments.fork_ranks()
    runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
