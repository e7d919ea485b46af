"""The daemon's end of a tier: starts its process, sends it requests, and restarts it when it ends.

Law of this file: ``submit`` never blocks, and each effect gets exactly one event as its result. A
load or a store ends only when the process has answered it or has been *reaped* (waited for by its
parent); until then the process may still use the slots (law 3).

When a process ends, its open requests fail. Another one is started after a pause; until its tier is
open, new requests fail at once. A process whose main thread does not answer heartbeats is suspect:
it gets no more requests, its open probes, epoch requests and clears fail at once, and its open
loads and stores wait. If it stays silent, it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from kvass.core.effects import FromTier, TierReport, ToTier
from kvass.daemon import logs
from kvass.daemon.tier_process import frames
from kvass.daemon.tier_process.child import spawn, wait_or_kill
from kvass.daemon.tier_process.health import Health, HealthState
from kvass.daemon.tier_process.operations import how
from kvass.errors import ConfigError, FrameError
from kvass.types import DEVICE_S

MAX_OPEN_REQUESTS: Final = 4096
"""Limit of the effects that a process has not answered yet. Further ones fail at once."""
_READ_BYTES: Final = 256 << 10
_TROUBLE_CHARS: Final = 200
_log = logging.getLogger("kvass.tiers")

Post = Callable[[FromTier | TierReport], None]


class Periods(msgspec.Struct):
    """The timeouts of a tier's process, in seconds, and two limits in heartbeats. Tests use shorter
    ones."""

    heartbeat_s: float = 1.0
    suspect_after: int = 3
    """A process is suspect after this many heartbeats without a message from it."""
    kill_after: int = 60
    """A process is killed after this many heartbeats without a message from it."""
    open_s: float = 120.0
    open_warning_s: float = 10.0
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    device_s: float = DEVICE_S
    """Seconds between the end of a process and the failure of its loads. A device may still write
    to the arena for the process meanwhile (law 3)."""
    close_s: float = 2.0
    """Seconds that the process waits for running calls after the daemon has closed the socket."""
    end_s: float = 1.0
    """Seconds that the process may take to exit, beside ``close_s``. Then it is killed."""


class TierProcess:
    """Tier ``number``, which runs in its own process.

    ``url`` says which tier to open. ``name`` is used in log lines. ``arena_fd`` is the descriptor
    of the arena. ``inherited``: descriptors that its process has open until it ends. All methods
    are called in the loop's thread.
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
        inherited: Sequence[int] = (),
    ) -> None:
        self._periods = p = periods or Periods()
        self._start = frames.Start(number, url, name, arena_bytes, p.close_s, log_format)
        self._arena_fd, self._inherited = arena_fd, inherited
        self._health = self._new_health()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._unanswered = 0
        """The number of heartbeats since the last message from the process."""
        self._silent = False
        """The process is suspect, and gets no more requests."""
        self._open_requests: dict[int, ToTier] = {}
        """Operation -> the effect, for all that the process has not answered."""
        self._restarts = 0
        self._fields: dict[str, Any] = {"name": name}

    def _new_health(self) -> Health:
        p = self._periods
        return Health(p.first_pause_s, p.longest_pause_s, p.longest_pause_s, HealthState.RETRYING)

    async def open(self, post: Post) -> None:
        """Start the process, and return when the tier is open. Results of ``submit`` are passed to
        ``post``.

        Raises ``ConfigError`` if the tier cannot be opened.
        """
        self._loop, self._post = asyncio.get_running_loop(), post
        self._supervision = task(self._supervise(await self._launch()))

    def submit(self, effect: ToTier) -> None:
        """Send ``effect`` to the process, or fail it if the tier is down. The result is passed to
        ``post``, never before this method has returned."""
        up = self._health.state is HealthState.UP and not self._silent
        if up and len(self._open_requests) < MAX_OPEN_REQUESTS:
            self._open_requests[effect.op] = effect
            self._send(effect)
        else:
            self._loop.call_soon(self._post, effect.failed())

    @property
    def number(self) -> int:
        return self._start.number

    @property
    def url(self) -> str:
        return self._start.url

    async def renew(self, url: str) -> None:
        """End the process, and start one with the options of ``url``. Raises ``ConfigError`` if the
        tier cannot be opened. Then the caller must call ``go_back``."""
        await self.end_and_fail()
        self._start = msgspec.structs.replace(self._start, url=url)
        self._supervision = task(self._supervise(await self._launch()))

    async def go_back(self, url: str) -> None:
        """Undo a ``renew`` that failed: start a process with the options of ``url``, after a
        pause."""
        await self.end_and_fail()
        self._start = msgspec.structs.replace(self._start, url=url)
        self._supervision = task(self._supervise(None))

    async def end_and_fail(self) -> None:
        """End the process as ``close`` does, and fail its open requests: loads and stores once the
        process has ended, all others at once."""
        self._health = self._new_health()  # this is no failure, so the next pause is short
        self._report_down("its options change")
        self._fail_slotless()
        await self.close()
        self._silent = False
        failing, self._open_requests = list(self._open_requests.values()), {}
        if any(how(effect).slots == "written" for effect in failing):
            await asyncio.sleep(self._periods.device_s)
        for effect in failing:
            self._post(effect.failed())

    async def close(self) -> None:
        """Close the socket, and return when the process has ended. The process refuses queued
        requests, waits for running calls and closes the tier. It is killed if it takes too long."""
        if self._supervision is not None:
            self._supervision.cancel()
        if self._process is not None:
            self._close_socket()
            await wait_or_kill(self._process, self._periods.close_s + self._periods.end_s)

    # ------------------------------------------------------------ one process after another

    async def _supervise(self, receiver: asyncio.Task[None] | None) -> None:
        """Watch the process, and start another one whenever it has ended. ``receiver``: the task
        that receives its messages; None: no process runs now."""
        trouble = "its options were refused" if receiver is None else await self._watch(receiver)
        while True:
            await self._end_process(trouble)
            await asyncio.sleep(self._health.pause_s)
            self._restarts += 1
            self._health.retry()
            try:
                receiver = await self._launch()
            except ConfigError as error:
                trouble = str(error).removeprefix(self._text(""))
                continue
            _log.warning("%s", self._text("it has a process again"))
            trouble = await self._watch(receiver)

    async def _launch(self) -> asyncio.Task[None]:
        """Start a process and wait until its tier is open. Returns the task that receives its
        messages, which ends when the process closes its socket.

        Raises ``ConfigError``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(
                    theirs.fileno(), self._arena_fd, self._start.name, self._inherited
                )
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
        answer = first.result()
        if answer is None:
            ended = await wait_or_kill(self._process, self._periods.end_s)
            raise ConfigError(self._text(f"{ended}; see above"))
        if isinstance(answer, frames.TierOpened) and answer.refusal:
            raise ConfigError(answer.refusal)
        self._health.succeeded(self._loop.time())
        return task(self._receive(messages))

    async def _watch(self, receiver: asyncio.Task[None]) -> str:
        """Send heartbeats until the process has closed its socket, or must be killed. Returns why
        it must be killed, or an empty text."""
        self._unanswered = 0
        while self._unanswered < self._periods.kill_after:
            if (await asyncio.wait([receiver], timeout=self._periods.heartbeat_s))[0]:
                return ""
            self._unanswered += 1
            self._send(frames.Heartbeat(logs.level()))
            if self._unanswered == self._periods.suspect_after:
                self._suspect()
        return "its process said nothing any more, and was killed"

    def _suspect(self) -> None:
        """Send the process no more requests, and fail the open ones that use no slots."""
        self._silent = True
        self._report_down("its process does not answer")
        _log.warning("%s", self._text("its process does not answer"))
        self._fail_slotless()

    def _fail_slotless(self) -> None:
        for effect in list(self._open_requests.values()):
            if how(effect).slots == "none":
                del self._open_requests[effect.op]
                self._post(effect.failed())

    async def _end_process(self, trouble: str) -> None:
        """Kill the process if it still runs, wait for its end, and fail its open requests."""
        assert self._process is not None
        self._silent = False
        self._health.failed(self._loop.time())
        self._report_down(trouble or "its process ends")
        self._close_socket()
        ended = await wait_or_kill(self._process, 0.0)
        failing, self._open_requests = list(self._open_requests.values()), {}
        _log.warning(
            "%s; %d operations failed, and another process starts in %g s",
            self._text(trouble or ended),
            len(failing),
            self._health.pause_s,
        )
        self._report_down(trouble or ended)
        for effect in failing:
            if how(effect).slots == "written":
                self._loop.call_later(self._periods.device_s, self._post, effect.failed())
            else:
                self._post(effect.failed())

    # ------------------------------------------------------------ messages and reports

    async def _receive(self, messages: AsyncIterator[frames.FromProcess]) -> None:
        async for message in messages:
            self._unanswered = 0
            if self._silent:
                self._silent = False
                _log.warning("%s", self._text("its process answers again"))
                self._report(self._fields)
            if isinstance(message, TierReport):
                self._fields = {**message.fields, "restarts": self._restarts}
                self._report(self._fields)
            elif (
                isinstance(message, FromTier)
                and self._open_requests.pop(message.op, None) is not None
            ):
                self._post(message)

    def _send(self, message: frames.ToProcess) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    def _close_socket(self) -> None:
        """Close the socket. Unsent requests are dropped; the process finishes its running calls."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _report(self, fields: dict[str, Any]) -> None:
        self._post(TierReport(self._start.number, fields))

    def _report_down(self, trouble: str) -> None:
        self._report({**self._fields, "up": False, "trouble": trouble[:_TROUBLE_CHARS]})

    def _text(self, text: str) -> str:
        return f"tier {self._start.name}: {text}"


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[frames.FromProcess]:
    """The messages of a process, until it closes the socket or sends an invalid frame."""
    decoder = frames.from_process()
    with suppress(OSError, FrameError):
        while data := await reader.read(_READ_BYTES):
            for message in decoder.feed(data):
                yield message


def task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task. An exception in it is a bug in kvass; it goes to the loop's exception
    handler."""

    def raise_error(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.result()

    task = asyncio.create_task(work)
    task.add_done_callback(raise_error)
    return task
