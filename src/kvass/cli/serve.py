"""The command ``kvass serve``: runs the daemon."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from kvass.config import FILE_ENV, HTTP, Config, Parser, add_flags, load, to_yaml
from kvass.daemon import logs
from kvass.errors import ConfigError
from kvass.wire.places import default_socket

_POLL_S: Final = 1.0
_PAUSE_S: Final = 2.0
_RETRY_S: Final = 0.02
_log = logging.getLogger("kvass")


def run(argv: list[str]) -> int:
    """Serve until a signal ends it, or print the configuration. Raises ``ConfigError``."""
    parser = Parser(prog="kvass serve", description="Run the daemon until SIGTERM or SIGINT.")
    add_flags(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resulting options as YAML, and end"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(argv))
    names = ("config", "print_config", "child")
    file, only_print, child = (options.pop(name) for name in names)
    if child:
        threading.Thread(target=_stop_with_parent, daemon=True).start()
    overridden = list[str]()
    config = _load(options, file, overridden.append)
    if only_print:
        print(to_yaml(config), end="")
        return 0
    logs.start_logging(config.log_level, config.log_format)
    for line in overridden:
        _log.info("%s", line)
    from kvass.daemon.main import serve
    from kvass.web.access import HttpAccess

    again = partial(_load, options, file, lambda line: None)
    read_again = again if file or os.environ.get(FILE_ENV) else None
    if config.http:
        HttpAccess.of(config)
    serve(config, _announce, read_again, partial(_web_process, config))
    return 0


def _announce(ready: str) -> None:
    """Print the ``ready`` line. The daemon serves even if nobody reads its standard output, or if
    the disk of the file is full."""
    try:
        print(ready, flush=True)
    except OSError as error:
        _log.warning("standard output: %s; the line was: %s", error.strerror, ready)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would fail


def _stop_with_parent() -> None:
    """Stop when stdin ends: ``kvass run``, which holds its other end, has ended."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _load(options: dict[str, Any], file: str | None, overridden: Callable[[str], None]) -> Config:
    """The configuration of a daemon: ``load``, with the default socket if none is given."""
    config = load(options, os.environ, file, overridden)
    return replace(config, socket=config.socket or default_socket())


@contextmanager
def _web_process(config: Config) -> Iterator[None]:
    """Runs ``kvass web`` as a child process while the daemon serves, if ``--http`` is set.

    If the child ends, another one is started. The listening socket stays open meanwhile, so no
    other process can take the port. Raises ``ConfigError``.
    """
    if not config.http:
        yield
        return
    over = threading.Event()
    with _listening(config) as listener:
        keeper = threading.Thread(target=_keep_web, args=(config, listener.fileno(), over))
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()


def _listening(config: Config) -> socket.socket:
    """A listening socket for HTTP. Waits for the port of a daemon that has just stopped. Raises
    ``ConfigError``."""
    from kvass.daemon.listen import LOCK_WAIT_S
    from kvass.web.access import listen

    begun = time.monotonic()
    while True:
        try:
            return listen(config)
        except ConfigError as error:
            in_use = getattr(error.__cause__, "errno", 0) == errno.EADDRINUSE
            if not in_use or time.monotonic() - begun > LOCK_WAIT_S:
                raise
            time.sleep(_RETRY_S)


def _keep_web(config: Config, fd: int, over: threading.Event) -> None:
    """Keep a child running until ``over``. Runs in a thread of its own.

    The child ends when its stdin does, so it does not outlive this process.
    """
    flags = [f"--child={fd}", f"--socket={config.socket}", f"--log-format={config.log_format}"]
    for name in HTTP:
        value = getattr(config, name)
        values = value if isinstance(value, list) else [value] if value else []
        flags += [f"--{name.replace('_', '-')}={each}" for each in values]
    while not over.is_set():
        level = f"--log-level={logs.level()}"
        command = [sys.executable, "-m", "kvass", "web", *flags, level]
        try:
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(fd,),
                start_new_session=True,
            ) as child:
                while child.poll() is None and not over.wait(_POLL_S):
                    pass
            ended = f"ended with status {child.returncode}"
        except OSError as error:  # there is no memory or process id left now
            ended = f"cannot be started: {error}"
        if not over.is_set():
            _log.warning("the web process %s: starting another", ended)
            over.wait(_PAUSE_S)
