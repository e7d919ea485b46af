"""The entry point of ``kvass``: runs a command, and prints its errors.

An error is one line on stderr that says what to do. The exit status is 2 for the caller's mistake,
and 1 if there is no daemon or it refuses the request. A command is the function ``run`` of the
module with the command's name. The module is imported only when the command runs, so that ``serve``
starts fast.
"""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Final

from kvass._version import __version__
from kvass.cli import environment  # noqa: F401 - it sets what numpy reads
from kvass.config import Parser
from kvass.errors import KvassError, Unavailable, UsageError
from kvass.tiers.url import without_seen

COMMANDS: Final = {
    "serve": "run the daemon",
    "run": "run a command with kvass switched on, and a daemon if there is none",
    "status": "show whether a daemon works, and what it saves",
    "explain": "say why the last requests did not hit more",
    "compare": "say in which fields the namespaces of two engines differ",
    "top": "watch a daemon",
    "web": "serve a daemon's metrics and dashboard over HTTP",
    "quota": "change the quotas of tenants",
    "blend": "store documents that prompts may have anywhere, and measure what that costs answers",
    "clear": "make a daemon forget all rows, or those of a model or tenant",
    "session": "show, fetch or release what a client's session has stored",
    "export": "write what a session has stored to a file",
    "import": "store what `kvass export` wrote",
    "simulate": "say how much memory a recorded workload needs",
    "bench": "measure copies and lookups on this machine",
    "doctor": "check what this machine can serve",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names and paths may have what its encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        command = _parser().parse_args(argv[:1]).command
        return int(import_module(f"kvass.cli.{command}").run(list(argv[1:])))
    except UsageError as error:
        print(f"kvass: {without_seen(str(error))}", file=sys.stderr)
        return 2
    except Unavailable as error:
        absent = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
        hint = "; start kvass serve, or name its socket with --socket or KVASS_SOCKET"
        print(f"kvass: {error}{hint if absent else ''}", file=sys.stderr)
        return 1
    except KvassError as error:
        print(f"kvass: {without_seen(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has ended, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> Parser:
    lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="kvass",
        description="KV cache as a shared service",
        formatter_class=RawDescriptionHelpFormatter,
        epilog=f"commands:\n{lines}\n\n`kvass COMMAND --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"kvass {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of these:")
    return parser
