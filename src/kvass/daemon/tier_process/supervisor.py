"""Supervises the process of a tier for the daemon: sends it effects, and restarts it when it ends.

Law of this file: ``submit`` never blocks, and exactly one event ends every effect. A load or a
store ends only when the process has answered it or has been *reaped*. Until then the process may
still use the slots (law 3).

If the process ends, its pending effects fail. Another process is started after a pause. Until its
tier is open, all effects fail at once. A process whose main thread answers no heartbeat is suspect:
it gets no more effects. Its pending loads and stores wait, and its other effects fail at once. If
it stays silent, it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvass.core.effects import FromTier, TierLoad, TierReport, TierStore, ToTier
from kvass.daemon import logs
from kvass.daemon.tier_process import frames
from kvass.daemon.tier_process.child import reaped, spawn
from kvass.daemon.tier_process.health import Health, HealthState
from kvass.daemon.tier_process.operations import failure
from kvass.errors import ConfigError, FrameError
from kvass.types import DEVICE_S

ROOM: Final = 4096
"""Effects that a process may have unanswered; more fail at once."""
_READ_BYTES: Final = 256 << 10
_TROUBLE_CHARS: Final = 200
_log = logging.getLogger("kvass.tiers")

Post = Callable[[FromTier | TierReport], None]


class Periods(msgspec.Struct):
    """Time limits for the process of a tier, in seconds. Tests use shorter ones."""

    heartbeat_s: float = 1.0
    suspect_after: int = 3
    """So many heartbeats in a row unanswered, and nothing else said either: it is suspect."""
    kill_after: int = 60
    """So many: it is killed."""
    open_s: float = 120.0
    open_warning_s: float = 10.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    device_s: float = DEVICE_S
    """Loads end so long after it was reaped: a device may still write for it (law 3)."""
    close_s: float = 2.0
    """Calls that still run when the daemon hangs up are waited for so long."""
    end_s: float = 1.0
    """What ending takes otherwise; then it is killed."""


class TierProcess:
    """The process of tier ``number``, which opens ``url`` over the arena behind ``arena_fd``.

    ``name`` is for people. All methods are called in the event loop's thread.
    """

    def __init__(
        self,
        number: int,
        url: str,
        name: str,
        arena_fd: int,
        arena_bytes: int,
        periods: Periods | None = None,
        log_format: str = "text",
    ) -> None:
        self._periods = p = periods or Periods()
        self._start = frames.Start(number, url, name, arena_bytes, p.close_s, log_format)
        self._arena_fd = arena_fd
        self._health = self._new_health()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._unanswered = 0
        """Heartbeats in a row."""
        self._silent = False
        """Too many: it is asked nothing more."""
        self._owed: dict[int, ToTier] = {}
        """What was asked and not answered, by operation."""
        self._restarts = 0
        self._fields: dict[str, Any] = {"name": name}

    def _new_health(self) -> Health:
        p = self._periods
        return Health(p.first_pause_s, p.longest_pause_s, p.longest_pause_s, HealthState.RETRYING)

    async def open(self, post: Post) -> None:
        """Start the process, and return when its tier is open. From then on ``submit`` may be
        called, and ``post`` is called with results. Raises ``ConfigError`` if the tier cannot be
        opened."""
        self._loop, self._post = asyncio.get_running_loop(), post
        hearing = await self._launch()
        self._supervision = task(self._supervise(hearing))

    def submit(self, effect: ToTier) -> None:
        """Send an effect to the process, or refuse it. Its end is posted, but never before this
        returns."""
        up = self._health.state is HealthState.UP and not self._silent
        if up and len(self._owed) < ROOM:
            self._owed[effect.op] = effect
            self._send(effect)
        else:
            self._loop.call_soon(self._post, failure(effect))

    @property
    def number(self) -> int:
        return self._start.number

    @property
    def url(self) -> str:
        return self._start.url

    async def renew(self, url: str) -> None:
        """End the process, and start one with other options. Raises ``ConfigError`` if the tier
        cannot be opened; then there is no process until ``go_back``."""
        await self.end()
        self._start = msgspec.structs.replace(self._start, url=url)
        self._supervision = task(self._supervise(await self._launch()))

    async def go_back(self, url: str) -> None:
        """Start a process with these options soon, after a change that failed."""
        await self.end()
        self._start = msgspec.structs.replace(self._start, url=url)
        self._supervision = task(self._supervise(None))

    async def end(self) -> None:
        """``close``, and all that it was asked fails, questions at once. It may be renewed."""
        self._health = self._new_health()  # it did not fail: no pause grows by this
        self._report_down("its options change")
        self._fail_questions()
        await self.close()
        self._silent = False
        owed, self._owed = list(self._owed.values()), {}
        if any(isinstance(effect, TierLoad) for effect in owed):
            await asyncio.sleep(self._periods.device_s)
        for effect in owed:
            self._post(failure(effect))

    async def close(self) -> None:
        """Close the socket, and return when the process has ended. The process refuses queued
        requests, finishes running calls and closes the tier. If that takes too long, it is
        killed."""
        if self._supervision is not None:
            self._supervision.cancel()
        if self._process is not None:
            self._hang_up()
            await reaped(self._process, self._periods.close_s + self._periods.end_s)

    # ------------------------------------------------------------ one process after another

    async def _supervise(self, hearing: asyncio.Task[None] | None) -> None:
        """``hearing`` None: it has no process now."""
        trouble = await self._watch(hearing) if hearing is not None else "its options were refused"
        while True:
            await self._end_process(trouble)
            await asyncio.sleep(self._health.pause_s)
            self._restarts += 1
            self._health.retry()
            try:
                hearing = await self._launch()
            except ConfigError as error:
                trouble = str(error).removeprefix(self._text(""))
                continue
            _log.warning("%s", self._text("it has a process again"))
            trouble = await self._watch(hearing)

    async def _launch(self) -> asyncio.Task[None]:
        """Start a process; when its tier is open, return the task that hears it until it hangs up.

        Raises ``ConfigError``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(theirs.fileno(), self._arena_fd, self._start.name)
            except OSError as error:
                ours.close()
                raise ConfigError(self._text(f"no process: {error.strerror}")) from error
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._start)
        self._send(frames.Heartbeat(logs.level()))
        messages = _messages(reader)
        first = asyncio.ensure_future(anext(messages, None))
        deadline = self._loop.time() + self._periods.open_s
        while not (await asyncio.wait([first], timeout=self._periods.open_warning_s))[0]:
            if self._loop.time() > deadline:
                text = f"not open after {self._periods.open_s:g} s; is its store well?"
                raise ConfigError(self._text(text))
            _log.warning("%s", self._text("still opening"))
        said = first.result()
        if said is None:
            ended = await reaped(self._process, self._periods.end_s)
            raise ConfigError(self._text(f"{ended}; see above"))
        if isinstance(said, frames.TierOpened) and said.refusal:
            raise ConfigError(said.refusal)
        self._health.succeeded(self._loop.time())
        return task(self._hear(messages))

    async def _watch(self, hearing: asyncio.Task[None]) -> str:
        """Return when it has hung up (empty), or has to be killed (why)."""
        self._unanswered = 0
        while self._unanswered < self._periods.kill_after:
            if (await asyncio.wait([hearing], timeout=self._periods.heartbeat_s))[0]:
                return ""
            self._unanswered += 1
            self._send(frames.Heartbeat(logs.level()))
            if self._unanswered == self._periods.suspect_after:
                self._suspect()
        return "its process said nothing any more, and was killed"

    def _suspect(self) -> None:
        """Send the process nothing more, and end the pending effects that use no slots."""
        self._silent = True
        self._report_down("its process does not answer")
        _log.warning("%s", self._text("its process does not answer"))
        self._fail_questions()

    def _fail_questions(self) -> None:
        """End the pending effects that use no slots."""
        questions = [e for e in self._owed.values() if not isinstance(e, TierLoad | TierStore)]
        for effect in questions:
            del self._owed[effect.op]
            self._post(failure(effect))

    async def _end_process(self, trouble: str) -> None:
        """Make sure that the process is dead, then end its pending effects."""
        assert self._process is not None
        self._silent = False
        self._health.failed(self._loop.time())
        self._report_down(trouble or "its process ends")
        self._hang_up()
        ended = await reaped(self._process, 0.0)
        owed, self._owed = list(self._owed.values()), {}
        _log.warning(
            "%s; %d operations failed, and another process starts in %g s",
            *(self._text(trouble or ended), len(owed), self._health.pause_s),
        )
        self._report_down(trouble or ended)
        for effect in owed:
            if isinstance(effect, TierLoad):
                self._loop.call_later(self._periods.device_s, self._post, failure(effect))
            else:
                self._post(failure(effect))

    # ------------------------------------------------------------ what it says, and what is told

    async def _hear(self, messages: AsyncIterator[frames.FromProcess]) -> None:
        async for message in messages:
            self._unanswered = 0
            if self._silent:
                self._silent = False
                _log.warning("%s", self._text("its process answers again"))
                self._report(self._fields)
            if isinstance(message, TierReport):
                self._fields = {**message.fields, "restarts": self._restarts}
                self._report(self._fields)
            elif isinstance(message, FromTier) and self._owed.pop(message.op, None) is not None:
                self._post(message)

    def _send(self, message: frames.ToProcess) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    def _hang_up(self) -> None:
        """Close the socket: what is unsent is dropped, and the process ends what it is at."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _report(self, fields: dict[str, Any]) -> None:
        self._post(TierReport(self._start.number, fields))

    def _report_down(self, trouble: str) -> None:
        self._report({**self._fields, "up": False, "trouble": trouble[:_TROUBLE_CHARS]})

    def _text(self, text: str) -> str:
        return f"tier {self._start.name}: {text}"


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[frames.FromProcess]:
    """What a process says, until it hangs up or says what is no message."""
    decoder = frames.from_process()
    with suppress(OSError, FrameError):
        while data := await reader.read(_READ_BYTES):
            for message in decoder.feed(data):
                yield message


def task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose error, one of ours, is raised where the loop's exception handler sees it."""

    def raise_error(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.result()

    task = asyncio.create_task(work)
    task.add_done_callback(raise_error)
    return task
