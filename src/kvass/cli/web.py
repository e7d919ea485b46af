"""The command ``kvass web``: serves a daemon's metrics and dashboard over HTTP."""

from __future__ import annotations

import os
import socket
import sys
import threading

from kvass.cli.daemon import add_daemon
from kvass.config import CONNECTION, HTTP, Parser, add_flags, load
from kvass.daemon import logs


def run(argv: list[str]) -> int:
    """Serve metrics, health checks and the dashboard of the daemon at ``--socket`` over HTTP.

    Raises ``ConfigError``. ``kvass serve --http`` runs this as its child. The child ends when its
    stdin does, so it does not outlive the daemon.
    """
    parser = Parser(
        prog="kvass web",
        description="Serve a daemon's metrics, health checks and dashboard over HTTP.",
    )
    add_daemon(parser)
    own = (*HTTP, "log_level", "log_format")
    add_flags(parser, *own)
    parser.add_argument("--child", metavar="FD", type=int, help="the parent's listening socket")
    options = vars(parser.parse_args(argv))
    child = options.pop("child")
    options["http"] = options["http"] or os.environ.get("KVASS_HTTP") or "127.0.0.1:9273"
    config = load(options, os.environ, wanted=[*CONNECTION, *own])
    logs.start_logging(config.log_level, config.log_format)
    from kvass.web.access import listen
    from kvass.web.server import WebServer

    server = WebServer(config, listen(config) if child is None else socket.socket(fileno=child))
    if child is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    print(f"web {server.url}", flush=True)
    server.run()
    return 0


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
