"""``kvass``: one parser, one subcommand per file.

Law of this file: whatever goes wrong is one line on stderr that says what to do, and exit status 2
for the caller's mistake, 1 for a daemon that is not there or says no. Subcommands are imported only
when they run, so that ``serve`` is ready at once and holds nothing it does not need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would keep buffers for threads unused

from kvass._version import __version__
from kvass.config import Parser, add_flags
from kvass.errors import KvassError, UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["bench"]:  # it has many flags of its own
            from kvass.cli import bench

            return bench.run(argv[1:])
        return _run(vars(parser().parse_args(argv)))
    except UsageError as error:
        print(f"kvass: {error}", file=sys.stderr)
        return 2
    except KvassError as error:
        print(f"kvass: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> Parser:
    """All commands and their flags."""
    top = Parser(prog="kvass", description="KV cache as a shared service")
    top.add_argument("--version", action="version", version=f"kvass {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the daemon")
    add_flags(serve)
    serve.add_argument("--config", metavar="FILE", help="YAML file of these options")
    serve.add_argument("--print-config", action="store_true", help="print as YAML, and leave")
    status = commands.add_parser("status", help="show what a daemon holds")
    clear = commands.add_parser("clear", help="make a daemon forget all rows")
    commands.add_parser("bench", help="measure this machine, against memcpy")
    for command in (status, clear):
        add_flags(command, "socket")
    status.add_argument("--json", action="store_true", help="print JSON")
    return top


def _run(options: dict[str, Any]) -> int:
    command = options.pop("command")
    if command == "serve":
        from kvass.cli import serve

        return serve.run(options)
    from kvass.cli import ask

    return {"status": ask.status, "clear": ask.clear}[command](options)
