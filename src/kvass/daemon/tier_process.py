"""The daemon's end of a tier: a process that does what the core asks of it.

Law of this file: ``submit`` never blocks, and every effect is ended by exactly one event. What a
process was asked and has not answered ends only when it has answered, or is *dead* (reaped, not
merely silent): until then it may write to the slots it was given (law 3).

A process that dies costs what it was at, which falls out; another one is started after a pause,
and until it serves, the tier's records are misses. One of which not even the main thread answers is
left alone: questions fall out at once, and only what may touch slots is waited for. If it stays so,
it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvass.core.effects import FromTier, TierEpoch, TierLoad, TierReport, TierStore, ToTier
from kvass.daemon.operations import fall_out
from kvass.daemon.tier_frames import Knock, NotOpened, Opened, Start, Up, encode, from_tier
from kvass.daemon.tier_host import CLOSE_S, DEAF_TO
from kvass.errors import ConfigError, FrameError
from kvass.wire.framing import Decoder

ROOM: Final = 4096
"""What a process may owe at a time; what comes then falls out."""
KNOCK_S: Final = 1.0
STALLED: Final = 3
"""So many knocks in a row unanswered, and nothing else said either: it is asked nothing more."""
UNANSWERED: Final = 60
"""So many: it is killed."""
OPEN_S: Final = 120.0
"""What opening may take."""
_SAY_S: Final = 10.0
_REAP_S: Final = 0.01
_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0
_GRACE_S: Final = 1.0
"""At the end, beyond the time that the process takes itself."""
_READ_BYTES: Final = 256 << 10
_WORDS: Final = 200
_log = logging.getLogger("kvass.tiers")

_PROMISED: Final = (TierStore, TierEpoch)
"""What a daemon that stops waits for."""

Post = Callable[[FromTier | TierReport], None]


class TierProcess:
    """Tier ``number``, opened from ``url`` in a process of its own, over the arena behind
    ``arena_fd``. ``name`` is for people. ``wait_open`` says whether it could be opened.

    ``grace_s``: after its death, until what a device may still write for it is over (law 3).
    Raises ``OSError`` if there can be no process.
    """

    _process: subprocess.Popen[bytes]
    _sock: socket.socket
    _decoder: Decoder[Up]
    _loop: asyncio.AbstractEventLoop
    _post: Post

    def __init__(
        self,
        number: int,
        url: str,
        name: str,
        arena_fd: int,
        arena_bytes: int,
        grace_s: float = 0.0,
    ) -> None:
        self._start = Start(number, url, name, arena_bytes)
        self._arena_fd = arena_fd
        self._grace_s = grace_s
        self._patient = False
        """The daemon stops: what is promised waits for the next process."""
        self._held: list[ToTier] = []
        self._owed: dict[int, ToTier] = {}
        """What was asked and not answered, by operation."""
        self._out = bytearray()
        self._listening = self._writing = self._open = False
        self._unanswered = 0
        self._pause_s = _PAUSE_S
        self._restarts = 0
        self._trouble = ""
        self._fields: dict[str, Any] = {"name": name}
        self._early: list[Up] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._spawn()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        fds = theirs.fileno(), self._arena_fd
        program = [sys.executable, "-P", "-m", "kvass.daemon.tier_host"]
        where = [os.path.abspath(path) for path in sys.path]
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}  # secrets
        # What means the daemon is the daemon's to heed, from the first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, DEAF_TO)
        try:
            self._process = subprocess.Popen(
                [*program, *map(str, (*fds, os.getpid())), self._start.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                env={**env, "PYTHONPATH": os.pathsep.join(where)},
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._sock, self._decoder = ours, from_tier()
        with suppress(OSError):  # it is gone already: reading will tell
            ours.sendall(encode(self._start))

    # ------------------------------------------------------------ before there is a loop

    def wait_open(self) -> None:
        """Return when the tier is open. Raises ``ConfigError`` if it cannot be."""
        self._sock.settimeout(_SAY_S)
        deadline = time.monotonic() + OPEN_S
        while not self._early:
            try:
                data = self._sock.recv(_READ_BYTES)
            except TimeoutError:
                if time.monotonic() > deadline:
                    text = (
                        f"tier {self._start.name}: not open after {OPEN_S:g} s; is its store well?"
                    )
                    raise ConfigError(text) from None
                _log.warning("tier %s: still opening", self._start.name)
                continue
            if not data:
                ended = _ended(self._process.wait())
                raise ConfigError(f"tier {self._start.name}: its process {ended}; see above")
            self._early += self._decoder.feed(data)
        first = self._early.pop(0)
        if isinstance(first, NotOpened):
            raise ConfigError(first.why)
        assert isinstance(first, Opened), first
        self._open = True

    def serve(self, loop: asyncio.AbstractEventLoop, post: Post) -> None:
        """From now on ``submit`` is called and ``post`` calls back, both in the loop's thread."""
        self._loop, self._post = loop, post
        self._listen()
        for said in self._early:
            loop.call_soon(self._heard, said)
        self._knock()

    # ------------------------------------------------------------ what it is asked

    def submit(self, effect: ToTier) -> None:
        """Have it done, or refused; its end is posted, never before this returns."""
        if self._open and not self._stalled and len(self._owed) < ROOM:
            self._owed[effect.op] = effect
            self._say(encode(effect))
        elif self._patient and not self._open and isinstance(effect, _PROMISED):
            self._held.append(effect)
        else:
            self._loop.call_soon(self._post, fall_out(effect))

    def hurry(self) -> None:
        """The daemon stops: if there is no process, have one soon, and what it is to keep waits."""
        self._patient = True
        self._pause_s = _REAP_S
        if (pause := self._timers.pop("restart", None)) is not None:
            pause.cancel()
            self._restart()

    @property
    def _stalled(self) -> bool:
        return self._unanswered >= STALLED

    def _say(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)  # with whatever else this turn has to say
        self._out += frame

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # it is going, or gone; reading tells
            self._out.clear()
        if self._out and not self._writing:
            self._loop.add_writer(self._sock, self._flush)
        elif self._writing and not self._out:
            self._loop.remove_writer(self._sock)
        self._writing = bool(self._out)

    # ------------------------------------------------------------ what it says

    def _listen(self) -> None:
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._readable)
        self._listening = True

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
            for said in self._decoder.feed(data):
                self._heard(said)
        except BlockingIOError:
            return
        except (ConnectionResetError, FrameError):
            data = b""
        if not data:
            self._bury()

    def _heard(self, said: Up) -> None:
        stalled, self._unanswered = self._stalled, 0
        if stalled:
            _log.warning("tier %s: its process answers again", self._start.name)
            self._post(TierReport(self._start.number, self._fields))
        if isinstance(said, TierReport):
            self._fields = {**said.fields, "restarts": self._restarts}
            self._post(TierReport(self._start.number, self._fields))
        elif isinstance(said, Opened):
            self._open, self._trouble = True, ""
            self._timers["open"].cancel()
            self._later("calm", _LONGEST_PAUSE_S, self._calm)
            _log.warning("tier %s: it has a process again", self._start.name)
            held, self._held = self._held, []
            for effect in held:
                self.submit(effect)
        elif isinstance(said, NotOpened):
            self._trouble = said.why
        elif isinstance(said, FromTier) and self._owed.pop(said.op, None) is not None:
            self._post(said)

    def _knock(self) -> None:
        self._later("knock", KNOCK_S, self._knock)
        if self._open and self._unanswered >= UNANSWERED:
            self._trouble = "its process said nothing any more, and was killed"
            self._bury()
        elif self._open:
            self._unanswered += 1
            self._say(encode(Knock()))
            if self._unanswered == STALLED:
                self._stall()

    def _stall(self) -> None:
        """Ask it nothing more; what it was asked and touches no slot ends."""
        self._tell_down("its process does not answer")
        _log.warning("tier %s: its process does not answer", self._start.name)
        questions = [e for e in self._owed.values() if not isinstance(e, TierLoad | TierStore)]
        for effect in questions:
            del self._owed[effect.op]
            self._post(fall_out(effect))

    def _too_long(self) -> None:
        self._trouble = f"it was not open after {OPEN_S:g} s"
        self._bury()

    # ------------------------------------------------------------ its end, and the next

    def _bury(self) -> None:
        """It has hung up, or is of no use: see that it is dead, and what it owes ends."""
        self._hang_up()
        self._tell_down(self._trouble or "its process ends")
        self._process.kill()
        self._reaped()

    def _reaped(self) -> None:
        status = self._process.poll()
        if status is None:
            self._later("reap", _REAP_S, self._reaped)
            return
        owed, self._owed = list(self._owed.values()), {}
        if self._patient:  # asking twice does no harm
            self._held = [e for e in owed if isinstance(e, _PROMISED)] + self._held
            owed = [e for e in owed if not isinstance(e, _PROMISED)]
        self._down(self._trouble or f"its process {_ended(status)}", len(owed))
        for effect in owed:
            if isinstance(effect, TierLoad) and self._grace_s:
                self._loop.call_later(self._grace_s, self._post, fall_out(effect))
            else:
                self._post(fall_out(effect))

    def _tell_down(self, trouble: str) -> None:
        fields = {**self._fields, "up": False, "trouble": trouble[:_WORDS]}
        self._post(TierReport(self._start.number, fields))

    def _down(self, trouble: str, fell_out: int) -> None:
        """Tell of it, and try again after a pause."""
        _log.warning(
            "tier %s: %s; %d operations fell out, and another process starts in %g s",
            *(self._start.name, trouble, fell_out, self._pause_s),
        )
        self._tell_down(trouble)
        self._later("restart", self._pause_s, self._restart)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _restart(self) -> None:
        self._timers.pop("restart", None)
        self._restarts += 1
        self._trouble, self._unanswered = "", 0
        try:
            self._spawn()
        except OSError as error:
            self._down(f"no process: {error.strerror}", 0)
        else:
            self._listen()
            self._later("open", OPEN_S, self._too_long)

    def _calm(self) -> None:
        self._pause_s = _PAUSE_S

    def _later(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(seconds, then)

    def _hang_up(self) -> None:
        self._open = False
        if self._listening:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        for name in {"calm", "open"} & self._timers.keys():
            self._timers[name].cancel()
        self._listening = self._writing = False
        self._out.clear()
        self._sock.close()

    # ------------------------------------------------------------ the daemon's end

    def close(self) -> None:
        """Hang up: the process refuses what is queued, ends what it is at, closes and ends."""
        for timer in self._timers.values():
            timer.cancel()
        self._hang_up()

    def wait(self) -> None:
        """After ``close``: return when it has ended; if it takes too long, it is killed."""
        try:
            self._process.wait(CLOSE_S + _GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def close_all(tiers: Sequence[TierProcess]) -> None:
    """Close them, and wait for all at once."""
    for tier in tiers:
        tier.close()
    for tier in tiers:
        tier.wait()


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
