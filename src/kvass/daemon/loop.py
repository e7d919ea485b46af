"""The event loop of the daemon. Its thread turns bytes from sockets into events of the
``CacheMachine``, and carries out the effects.

Law of this file: it decides nothing about the cache. Each fault of a connection becomes an event
(``Faulted``, ``Lost``), because only the core knows when a connection may be closed (law 3). An
exception of the core is a broken invariant: the daemon logs the event that raised it, on one line,
writes the last events to a file, and ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from kvass import processes
from kvass.config import quotas
from kvass.core import effects
from kvass.core.effects import ConnectionId
from kvass.core.event_lines import line
from kvass.core.histogram import Histogram
from kvass.core.machine import CacheMachine
from kvass.core.metrics import LOOP_HISTOGRAMS
from kvass.core.tiers.epochs import LOOK_AGAIN_S
from kvass.daemon import notify
from kvass.daemon.connection import Connection
from kvass.daemon.connection_log import LOGGED, ConnectionLog
from kvass.daemon.last_events import LastEvents
from kvass.daemon.lasting import L1Memory
from kvass.daemon.live import LiveConfig
from kvass.daemon.notices import Notices
from kvass.daemon.peer_process import PeerProcess, process_behind
from kvass.daemon.populate import Populating, thread_cpus
from kvass.daemon.recording import Recorder
from kvass.daemon.tier_process.supervisor import task
from kvass.daemon.tier_set import TierSet
from kvass.errors import ConfigError, FrameError
from kvass.messages import Error, FromClient, Granted, Lookup, Reserve, StatusReply, Welcome
from kvass.types import Size
from kvass.wire import framing
from kvass.wire.channel import peer_of

READ_BYTES: Final = 64 << 10
"""The most that is read from one connection at a time."""
TURN_S: Final = 0.003
"""For how long the messages of one connection are served before others have their turn."""
TURN_BYTES: Final = 1 << 20
"""A turn ends, too, when so many bytes of replies wait to be sent."""
GC_THRESHOLD: Final = (50_000, 20, 100)
"""For ``gc.set_threshold``. A full collection takes milliseconds in a daemon, so it is made
rare."""
_ACCEPT_PAUSE_S: Final = 0.1
_TICK_S: Final = 0.001
_LAG_S: Final = 1.0
"""Seconds between two measurements of the loop's lag."""
_log = logging.getLogger("kvass")


class Server:
    """Serves the clients of one ``CacheMachine`` on one listening socket until it is stopped.

    It opens ``tiers`` first and closes them at the end. ``live`` has the options that can change
    while it serves; SIGHUP reloads them.
    """

    def __init__(
        self,
        machine: CacheMachine,
        l1: L1Memory,
        listener: socket.socket,
        live: LiveConfig,
        tiers: TierSet,
        notices: Notices,
        recorder: Recorder | None = None,
    ) -> None:
        self._machine = machine
        self._l1, self._arena = l1, l1.arena
        self._listener = listener
        self._live = live
        self._connection_log = ConnectionLog(machine.small_l1)
        self._last = LastEvents(machine.state.config)
        self._notices, self._recorder = notices, recorder
        self._connections: dict[ConnectionId, Connection] = {}
        self._watched: dict[ConnectionId, PeerProcess] = {}
        """Processes of lost connections. Slots in quarantine wait until these have ended."""
        self._to_flush: dict[ConnectionId, Connection] = {}
        """Connections to flush at the end of this turn."""
        self._last_number = 0
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._tick: asyncio.TimerHandle | None = None
        self._tiers = tiers
        self._draining = False
        """The daemon is stopping: only flushes go on."""
        self._populating = Populating(self._arena, self._tell_mark, self._tell_lack, thread_cpus())
        self._times = {name: Histogram() for name in LOOP_HISTOGRAMS}

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT. Calls ``on_ready`` once clients can connect.

        Raises ``ConfigError`` if a tier cannot be opened, or if there is too little memory. An
        exception of a callback, for example a broken invariant, is raised, too.
        """
        with asyncio.Runner() as runner:
            runner.run(self._serve(on_ready))

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        self._loop.set_exception_handler(self._broken)
        try:
            await self._tiers.open(self._handle)
            await self._serve_until_stopped(on_ready)
        finally:
            await self._tiers.close()
        for name, rows in self._machine.unflushed():
            _log.warning("tier %s: %d rows were not flushed", name, rows)

    async def _serve_until_stopped(self, on_ready: Callable[[], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop)
        hangups = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGHUP, hangups.set)
        reloads = task(self._reload(hangups))
        self._listener.setblocking(False)
        self._watch_former()
        self._listen()
        self._loop.call_later(LOOK_AGAIN_S, self._renew_notes)
        self._look_at_lag(self._loop.time())
        on_ready()
        notify.send("READY=1")
        notify.feed_watchdog(self._loop)
        gc.freeze()  # what exists now lives as long as we do
        gc.set_threshold(*GC_THRESHOLD)
        self._populating.start()
        try:
            await self._stopped
        finally:
            reloads.cancel()
            self._populating.stop()
            self._stop_listening()
            for connection in self._connections.values():
                connection.close_now()
            for watched in list(self._watched):
                self._unwatch(watched)
            for process in filter(None, self._l1.former.values()):
                self._loop.remove_reader(process)
                process.close()

    async def _reload(self, hangups: asyncio.Event) -> None:
        """Reload on each SIGHUP. All that come during a reload cause one more."""
        while await hangups.wait():
            hangups.clear()
            before = self._live.current.quota
            await self._live.reload(self._change_tiers)
            if self._live.current.quota != before:
                wanted = quotas(self._live.current)
                self._handle(effects.QuotasAre(wanted))
                if self._machine.quotas != {*wanted}:
                    self._live.keep_quota(before)
                    said = "SIGHUP: the quotas stay as they were: too many other tenants"
                    self._notices.problem("reload", said)

    async def _change_tiers(self, urls: list[str]) -> None:
        await self._tiers.change(urls, self._machine.tier_number, self._handle)

    def _stop(self) -> None:
        """Handle SIGTERM or SIGINT. The first one starts to flush and lets stores end, for at
        most ``stop_s``; the second one ends the daemon at once."""
        if self._draining:
            self._end()
            return
        self._draining = True
        notify.send("STOPPING=1")
        rows = sum(rows for _, rows in self._machine.unflushed())
        _log.info("stopping; %d rows are left to flush", rows)
        self._stop_listening()
        self._loop.call_later(self._live.current.stop_s, self._end)
        self._handle(effects.Stopping())

    def _end(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _listen(self) -> None:
        if not self._draining:
            self._loop.add_reader(self._listener, self._accept)

    def _stop_listening(self) -> None:
        """Close the listening socket: the kernel refuses connections. The path stays locked."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an exception of a callback: end the daemon, because its state may be broken."""
        if not self._stopped.done():
            error = context.get("exception") or AssertionError(context["message"])
            self._stopped.set_exception(error)

    def _tell_mark(self, populated: int) -> None:
        """Pass the mark of a populating thread to the core."""
        with suppress(RuntimeError):  # the loop closed meanwhile
            self._loop.call_soon_threadsafe(self._handle, effects.PopulatedTo(populated))

    def _tell_lack(self, there: int, error: OSError) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lacks_memory, there, error)

    def _lacks_memory(self, there: int, error: OSError) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(
                ConfigError(
                    f"l1_size: of {Size(self._arena.size).rounded()} only "
                    f"{Size(there).rounded()} could be had: {error.strerror}; give less"
                )
            )

    # ------------------------------------------------------------ sockets to events

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # out of descriptors: let some connections end first
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._listen)
            return
        self._last_number += 1
        number = self._last_number
        peer = peer_of(sock)
        self._connection_log.opened(number, peer)
        process = process_behind(sock, peer.pid)
        self._connections[number] = Connection(self._loop, sock, number, self._readable, process)
        own = peer.uid in (0, os.geteuid())
        refusal = self._live.access.refusal(peer) or ""
        start = processes.start_time(peer.pid)
        self._step(effects.Opened(number, peer.uid, own, refusal, peer.pid, start))
        self._finish_turn()

    def _readable(self, connection: Connection) -> None:
        size = connection.read_into(self._scratch)
        if size == 0:
            self._at_eof(connection)
        elif size is not None and not connection.ignoring:
            self._take(connection, connection.decoder.feed(self._scratch[:size]))
        self._finish_turn()

    def _take(self, connection: Connection, messages: Iterator[FromClient]) -> None:
        """Pass ``messages`` to the core, for one turn at most. The others follow in the next turn,
        after what others have sent meanwhile."""
        end = time.monotonic() + TURN_S
        try:
            for message in messages:
                event = effects.Received(connection.number, message)
                self._step(event, connection.decoder.size)
                if not self._is_heard(connection):
                    return
                if time.monotonic() >= end or connection.unsent > TURN_BYTES:
                    connection.pause()
                    self._loop.call_soon(self._go_on, connection, messages)
                    return
        except FrameError as fault:
            self._step(effects.Faulted(connection.number, fault.code, str(fault)))

    def _go_on(self, connection: Connection, messages: Iterator[FromClient]) -> None:
        """Begin another turn of a connection that was not done in its last one."""
        if self._connections.get(connection.number) is connection:
            connection.resume()
        if self._is_heard(connection):
            self._take(connection, messages)
            self._finish_turn()

    def _is_heard(self, connection: Connection) -> bool:
        """Whether the connection goes on. If not, its socket may be closed already."""
        there = self._connections.get(connection.number) is connection
        return there and not connection.ignoring

    def _at_eof(self, connection: Connection) -> None:
        number = connection.number
        if connection.decoder.inside_frame and not connection.ignoring:
            self._step(effects.Faulted(number, "bad_frame", "the stream ended inside a frame"))
        process = connection.process
        exiting = process is not None and self._machine.owes(number) and process.exiting
        self._step(effects.Lost(number, exiting))
        self._connection_log.lost(number)
        if (left := self._connections.pop(number, None)) is not None:
            left.close_now()

    def _watch(self, watch: effects.Watch) -> None:
        if (process := self._connections[watch.connection].take_process()) is not None:
            self._watched[watch.connection] = process
            self._loop.add_reader(process, self._process_ended, watch.connection)
            if watch.until < math.inf:
                self._loop.call_at(watch.until, self._unwatch, watch.connection)

    def _watch_former(self) -> None:
        """Watch the engines of a former daemon that may still write to the arena. The core itself
        waits for those that cannot be watched."""
        for number, process in [*self._l1.former.items()]:
            if process is None:
                self._former_ended(number)
            else:
                self._loop.add_reader(process, self._former_ended, number)

    def _former_ended(self, number: int) -> None:
        if (process := self._l1.former.pop(number)) is not None:
            self._loop.remove_reader(process)
            process.close()
        self._handle(effects.FormerEnded(number))

    def _unwatch(self, number: ConnectionId) -> None:
        if (process := self._watched.pop(number, None)) is not None:
            self._loop.remove_reader(process)
            process.close()

    def _process_ended(self, number: ConnectionId) -> None:
        self._unwatch(number)
        self._handle(effects.ProcessEnded(number))

    def _handle(self, event: effects.Event) -> None:
        self._step(event)
        self._finish_turn()

    # ------------------------------------------------------------ the core and its effects

    def _step(self, event: effects.Event, size: int = 0) -> None:
        """Pass ``event`` to the core and carry out the effects. ``size``: bytes of the frame that
        the event came in."""
        now = time.monotonic()
        self._last.add(now, event, size)
        try:
            todo = self._machine.step(event, now)
        except Exception as error:  # a bug in kvass: report the events that led to it, and end
            _log.critical("the core failed at this event, so the daemon ends: %s", line(now, event))
            self._last.write(self._live.current.socket + ".failed", error)
            raise
        if type(event) is effects.Received:
            if type(event.message) is Lookup:
                self._times["lookup_core_seconds"].observe(time.monotonic() - now)
            if self._recorder is not None:
                accepted = _accepted(event.message, todo)
                if accepted is not None:
                    namespace = self._machine.namespace(event.connection)
                    self._recorder.take(now, namespace, accepted)
        for effect in todo:
            self._carry_out(effect)

    def _carry_out(self, effect: effects.Effect) -> None:
        if type(effect) is effects.Send:
            if type(effect.message) is StatusReply:
                times = {name: histogram.fields() for name, histogram in self._times.items()}
                effect.message.fields["histograms"].update(times)
                there = {str(node): n for node, n in self._populating.by_node.items()}
                effect.message.fields["l1_node_bytes"] = there
                effect.message.fields["arena"] = self._l1_fields()
                effect.message.fields.update(self._notices.fields())
            if (connection := self._connections.get(effect.connection)) is not None:
                fd = self._arena.fileno() if effect.with_arena else None
                connection.queue(framing.encode_reply(effect.message), fd)
                self._to_flush[effect.connection] = connection
                if type(effect.message) is Welcome:
                    connection.allow_large_frames()
            if type(effect.message) in LOGGED:
                register = self._machine.registered(effect.connection)
                self._connection_log.replied(effect.connection, effect.message, register)
        elif type(effect) is effects.Close:
            if (connection := self._connections.pop(effect.connection, None)) is not None:
                connection.close()
            self._connection_log.lost(effect.connection)
        elif type(effect) is effects.HalfClose:
            if (connection := self._connections.get(effect.connection)) is not None:
                connection.half_close()
        elif type(effect) is effects.Watch:
            self._watch(effect)
        elif isinstance(effect, effects.ToTier):
            self._tiers.submit(effect)

    def _l1_fields(self) -> dict[str, Any]:
        place, found = self._l1.place, self._machine.adoption
        return {
            "place": "" if place is None else place.name,
            "started_empty": self._l1.cold,
            "adopted_rows": 0 if found is None else found.rows,
            "adopted_bytes": 0 if found is None else found.bytes,
            "rested_slots": 0 if found is None else found.resting,
            **self._machine.resting(),
            "lacks_index": place is not None and place.lacks_index,
        }

    def _finish_turn(self) -> None:
        """Flush the connections that have queued frames, and schedule the core's next tick."""
        while self._to_flush:
            queued, self._to_flush = self._to_flush, {}
            for number, connection in queued.items():
                if not connection.flush():
                    connection.mute()
                    self._step(effects.Faulted(number, "limit", "too many replies left unread"))
        due = self._machine.next_deadline()
        if due is not None:
            when = max(due, time.monotonic() + _TICK_S)
            if self._tick is None or when < self._tick.when():  # messages must not delay it
                if self._tick is not None:
                    self._tick.cancel()
                self._tick = self._loop.call_at(when, self._ticked)
        if self._draining and not self._machine.busy:
            self._end()

    def _ticked(self) -> None:
        self._tick = None
        self._handle(effects.Tick())

    def _look_at_lag(self, due: float) -> None:
        now = self._loop.time()
        self._times["event_loop_lag_seconds"].observe(max(0.0, now - due))
        self._loop.call_at(now + _LAG_S, self._look_at_lag, now + _LAG_S)

    def _renew_notes(self) -> None:
        """Send the core a tick from time to time, even if nothing else is due: it then reads the
        tiers' notes again."""
        self._loop.call_later(LOOK_AGAIN_S, self._renew_notes)
        self._handle(effects.Tick())


def _accepted(message: FromClient, todo: list[effects.Effect]) -> FromClient | None:
    """The message that led to ``todo``, without the items that were refused; None if all of it
    was."""
    for reply in [each.message for each in todo if type(each) is effects.Send]:
        if type(reply) is Error:
            return None
        if type(message) is Reserve and type(reply) is Granted:
            both = zip(message.items, reply.grants, strict=True)
            good = [item for item, grant in both if not grant.error]
            return Reserve(items=good, width=message.width) if good else None
    return message
