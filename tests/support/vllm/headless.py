"""The child's half of ``nodes.Headless``: what ``vllm serve --headless`` does on every node but the
first. It ends as on SIGTERM when stdin ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from tests.support.vllm import instruments
from tests.support.vllm.child import engine_args


def main() -> None:
    """Entry point: ``python -m tests.support.vllm.headless '{"model": ...}'``."""
    lives = os.dup(1)  # the parent sees its end
    os.dup2(2, 1)  # vLLM prints
    config = json.loads(sys.argv[1])
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if config.get("fork_ranks"):
        instruments.fork_ranks()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--headless"])
    vars(args).update(engine_args(config), api_server_count=0)

    def end_with_stdin() -> None:
        os.read(0, 1)  # a fork would inherit the lock of ``sys.stdin``
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    run_headless(args)
    os.close(lives)


if __name__ == "__main__":
    main()
