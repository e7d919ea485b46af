"""The options that say which daemon a command connects to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvass.client.client import Client
from kvass.config import CONNECTION, Parser, add_flags, load


def add_daemon(parser: Parser) -> None:
    """Add the options that name a daemon to ``parser``."""
    add_flags(parser, *CONNECTION)


def client(options: Mapping[str, Any]) -> Client:
    """A client of the daemon that the parsed ``options`` name. Raises ``ConfigError``."""
    config = load(options, os.environ, wanted=CONNECTION)
    return Client(config.socket, daemon_uid=config.daemon_uid)
