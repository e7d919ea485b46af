"""The options that say which daemon a command connects to."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from kvass.client.client import Client
from kvass.config import CONNECTION, Config, Parser, add_flags, load


def add_daemon(parser: Parser) -> None:
    """Add the options that name a daemon to ``parser``."""
    add_flags(parser, *CONNECTION)


def parser_of(command: str, about: str) -> Parser:
    parser = Parser(prog=f"kvass {command}", description=about)
    add_daemon(parser)
    return parser


def parse(parser: Parser, argv: list[str]) -> tuple[Namespace, dict[str, Any]]:
    """The options of ``parser_of``: the command's own, and those that name the daemon."""
    options = vars(parser.parse_args(argv))
    named = {name: options.pop(name) for name in CONNECTION}
    return Namespace(**options), named


def client(options: Mapping[str, Any]) -> Client:
    """A client of the daemon that the parsed ``options`` name. Raises ``ConfigError``."""
    config = place(options)
    return Client(config.socket, daemon_uid=config.daemon_uid)


def place(options: Mapping[str, Any]) -> Config:
    """Which daemon the parsed ``options`` name. Raises ``ConfigError``."""
    return load(options, os.environ, wanted=CONNECTION)
