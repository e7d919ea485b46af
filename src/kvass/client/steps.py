"""The connection of an engine's scheduler to the daemon of another node, through the engine's own
steps: ``StepClient`` in the scheduler, ``Relay`` in the *agent*, the first rank of that node.

What the scheduler sends travels in a step's work (``ToAgent``), what the daemon answers in the
report of a step (``FromAgent``). The agent's connection is that of a scheduler, and it passes on
today's messages. ``kvass`` opens no port, and daemons do not talk to each other.

Laws of this file:

- Nobody waits. The agent sends what came and returns what is there; ``StepClient.wait`` polls.
- A message is of one connection of the agent, and is dropped where another one is.
- A lookup's budget is less by what the last step took (``way_s``), so that an answer at its
  deadline comes in time. It is no less than that step took, as the answer comes no earlier.
- A step's report may be lost, with all that it said. A step that ended without one lost it, because
  steps end in their order. Then the connection counts as lost, too, as the scheduler knows neither
  what arrived nor what was lent. No clock decides that, so a slow step is no lost one.
- What the scheduler learns of, a lease or a reservation, is handed over already: the agent sends
  ``HandedOver`` before it returns the answer. So the daemon keeps it until the ranks settle it,
  whatever becomes of the agent's connection. The scheduler gives it back through the node's ranks.
- No clock of another machine is compared with one here. The agent says how much time is left. The
  scheduler counts that from when it asked, which is earlier than when the agent read its clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvass.client.connection import DaemonConnection
from kvass.client.reconnecting import CLOSE_S, Reconnecting
from kvass.client.requests import OpenRequests
from kvass.client.scheduler import SchedulerClient
from kvass.errors import KvassError, RemoteError, Unavailable, UsageError
from kvass.messages import (
    Abort,
    AnyMessage,
    Error,
    FromClient,
    FromDaemon,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Promoting,
    Register,
    Release,
    Reserve,
    Welcome,
)

ANSWERED_S: Final = 1.0
"""How long after its budget the answer to a lookup that nobody waits for is fetched."""

Settling = Release | Abort
"""What gives back a lease or a reservation that no rank was told of."""


class RelayedMatch(Matched, tag="relayed_match"):
    """A match of another node. Its times are such of the scheduler's clock; ``shift_s`` later they
    are those that the daemon said."""

    shift_s: float = 0.0


class RelayedGrant(Granted, tag="relayed_grant"):
    """A grant of another node, as ``RelayedMatch``."""

    shift_s: float = 0.0


@dataclass
class ToAgent:
    """What step ``step`` brings to an agent. ``number``: of the last step that had messages.
    ``messages``: for its connection number ``epoch``. ``registration``: how the agent registers
    from now on, until it has; None: as before. ``ended``: the last step whose report came or never
    will. ``heard``: how many reports of the agent came."""

    number: int = 0
    epoch: int = 0
    messages: list[FromClient] = field(default_factory=list)
    registration: Register | None = None
    step: int = 0
    ended: int = 0
    heard: int = 0


@dataclass
class FromAgent:
    """What an agent returns. ``number``: of the last ``ToAgent``. ``epoch``: the number of its
    connection; 0: it has none, because of ``failure``. ``welcome``, ``registered``: of a connection
    that is new. ``answers``: with the time at which the agent read its clock. ``count``: which of
    the agent's reports it is, from 1 on."""

    number: int = 0
    epoch: int = 0
    failure: str = ""
    welcome: Welcome | None = None
    registered: Register | None = None
    answers: list[tuple[FromDaemon, float]] = field(default_factory=list)
    count: int = 0


# ---------------------------------------------------------------- in the agent


class Relay(Reconnecting):
    """The agent's connection. Used from the engine's thread of its rank."""

    def __init__(self, socket: str, daemon_uid: int | None, registration: Register) -> None:
        super().__init__(socket, registration, daemon_uid=daemon_uid)
        self._epoch = 0
        self._answers: list[FromDaemon] = []
        self._number = self._step = 0
        """Of the last ``ToAgent``."""
        self._count = self._said_in = 0
        """How many reports there were, and the step of the last one."""
        self._told: tuple[int, int, str] | None = None
        """The number that was returned, that of the connection, and why there is none."""
        self.start()

    def _on_connected(self) -> None:
        self._epoch += 1
        self._answers = []

    def close(self) -> None:
        """As the base class. A step does it, so it waits for no handshake. A thread that has a
        connection ends at once, and the next agent registers as it did."""
        self._close(CLOSE_S if self.connected else 0.0)

    def _read(self, timeout_s: float = 0.0) -> None:
        if (connection := self.connection) is not None:
            try:
                self._answers += connection.channel.receive(timeout_s)
            except (Unavailable, RemoteError) as error:
                self.lose(connection, error)

    def send(self, to: ToAgent) -> None:
        """Pass on what a step brought."""
        with self.lock:
            self._number, self._step = to.number, to.step
            if to.heard < self._count and self._said_in <= to.ended:
                self._end(Unavailable("a report to the scheduler was lost"))
            if to.registration is not None and not _alike(to.registration, self.registration):
                self.register_as(to.registration)
            for message in to.messages:
                self._send(message, to.epoch)

    def _end(self, error: Unavailable) -> None:
        if self.connection is not None:
            self.lose(self.connection, error)
        self._told = None

    def _send(self, message: FromClient, epoch: int) -> None:
        connection = self.connection
        if connection is None or epoch != self._epoch:
            if isinstance(message, Register):
                self.register_as(message)
            return
        try:
            connection.channel.send(message)
        except UsageError as error:
            self._answers.append(Error(seq=message.seq, code="limit", text=str(error)))
        except Unavailable as error:
            self.lose(connection, error)
        else:
            if isinstance(message, Register):
                self.registration = connection.registration = message
            if connection.channel.wants_write:
                self.wake()

    def take(self, most_s: float = 0.0) -> FromAgent | None:
        """What came since the last call; None: nothing. If an answer is due, wait for it for at
        most ``most_s``."""
        with self.lock:
            self._read(most_s if self._number != (self._told or (0,))[0] else 0.0)
            connection, answers = self.connection, self._answers
            if connection is not None and not self._keep(connection, answers):
                connection = None
            now_s, news, told = time.monotonic(), FromAgent(self._number), self._told
            if connection is None:
                news.failure = "" if self._failure is None else str(self._failure)
            else:
                news.epoch = self._epoch
                news.answers = [(answer, now_s) for answer in answers]
            if connection is not None and (told is None or told[1] != news.epoch):
                news.welcome, news.registered = connection.welcome, connection.registration
            self._answers, self._told = [], (news.number, news.epoch, news.failure)
            if not news.answers and self._told == told:
                return None
            self._count, self._said_in = self._count + 1, self._step
            news.count = self._count
            return news

    def _keep(self, connection: DaemonConnection, answers: Sequence[FromDaemon]) -> bool:
        """Have the daemon keep what it lent in ``answers`` until the ranks settle it. False: the
        connection is lost, so it is void."""
        leases = [one.lease for one in answers if isinstance(one, Matched) and one.lease]
        grants = [g for one in answers if isinstance(one, Granted) for g in one.grants]
        reservations = [grant.reservation for grant in grants if grant.reservation]
        if not leases and not reservations:
            return True
        lent = HandedOver(
            boot=connection.boot, leases=tuple(leases), reservations=tuple(reservations)
        )
        try:
            connection.channel.send(lent)
        except Unavailable as error:
            self.lose(connection, error)
            return False
        if connection.channel.wants_write:
            self.lose(connection, Unavailable("the daemon does not read"))
            return False
        return True


# ---------------------------------------------------------------- in the scheduler


class StepChannel:
    """What carries a ``StepClient``'s messages: lists, which steps empty and fill."""

    waits: Final = False
    wants_write: Final = False

    def __init__(self, epoch: int, under_way: set[int]) -> None:
        """``under_way``: as ``OpenRequests.under_way``."""
        self.epoch, self._under_way = epoch, under_way
        self.sent: list[FromClient] = []
        self.settled: list[Settling] = []
        """What the ranks of the node are to give back."""
        self._arrived: list[FromDaemon] = []
        self._asked_s: dict[int, float] = {}
        """When each open request was sent, by ``seq``."""
        self._due_s: dict[int, float] = {}
        """By when each open request must be answered whose answer may lend something."""

    def send(self, message: AnyMessage) -> None:
        if isinstance(message, Release | Abort):
            self.settled.append(message)
            return
        if isinstance(message, HandedOver):  # the agent has handed it over already
            message = HandedOver(
                boot=message.boot,
                results=message.results,
                prefill_tokens_s=message.prefill_tokens_s,
            )
            if not message.results and not message.prefill_tokens_s:
                return
        if message.seq:
            self._asked_s[message.seq] = time.monotonic()
            self._under_way.add(message.seq)
        if isinstance(message, Lookup | Reserve):
            budget_s = message.budget_ms / 1000 if isinstance(message, Lookup) else 0.0
            self._due_s[message.seq] = time.monotonic() + budget_s + ANSWERED_S
        self.sent.append(message)  # type: ignore[arg-type]  # a client sends nothing else

    def receive(self, timeout_s: float) -> list[FromDaemon]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def arrive(self, answers: Sequence[tuple[FromDaemon, float]]) -> None:
        """Take in what the agent returned."""
        for answer, read_s in answers:
            asked_s = self._asked_s.get(answer.seq, 0.0)
            if not isinstance(answer, Matched | Granted):
                self._arrived.append(answer)
            else:
                self._arrived.append(_relayed(answer, read_s - asked_s))
            if not isinstance(answer, Promoting):  # the answer itself comes later
                self._asked_s.pop(answer.seq, None)
                self._due_s.pop(answer.seq, None)
                self._under_way.discard(answer.seq)

    def may_lend(self, seqs: Iterable[int]) -> bool:
        """Whether an answer to one of ``seqs`` is to come that may lend something."""
        now_s = time.monotonic()
        return any(self._due_s.get(seq, 0.0) > now_s for seq in seqs)

    def leave(self, seq: int) -> None:
        """No step is to be made for the answer to ``seq``."""
        self._due_s.pop(seq, None)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Nothing to do: the agent has the socket."""

    drop = close


def _relayed(answer: Matched | Granted, shift_s: float) -> RelayedMatch | RelayedGrant:
    """``answer`` in the scheduler's time: ``shift_s`` earlier than the daemon said."""
    fields: dict[str, Any] = msgspec.structs.asdict(answer)
    fields["given_s"] -= shift_s
    fields["deadline_s"] -= shift_s
    kind = RelayedMatch if isinstance(answer, Matched) else RelayedGrant
    return kind(**fields, shift_s=shift_s)


class StepClient(SchedulerClient):
    """The scheduler's client of another node. In each step call ``outgoing``, and ``arrived`` with
    what the agent returned.

    ``registration``, ``readers``: of the node. Nothing connects here: the agent does.
    """

    def __init__(
        self, name: str, registration: Register, *, readers: Sequence[int], spare: int
    ) -> None:
        super().__init__("", registration, readers=readers, spare=spare)
        self.name = name
        self.failure = ""
        """Why the agent has no connection, as it said last."""
        self.astray = False
        """Whether the daemon may keep what nobody here knows of: the connection was lost, and the
        daemon still runs. The node's ranks must register anew."""
        self._boot = b""
        """Of the last connection."""
        self._settled: list[Settling] = []
        self._told: Register | None = None
        """The registration that the agent knows."""
        self._alive = False
        """Whether the agent's connection is that of ``connection``."""
        self._number = self._heard = 0
        """The last step that had messages, and how many reports of the agent came."""
        self._steps: deque[tuple[int, list[int], float]] = deque()
        """The steps with messages that have not come back, the requests of each, and when it
        began."""

    def start(self) -> None:
        """Nothing to do: the agent connects."""

    def connect(self, timeout_s: float) -> Welcome:
        """The welcome of the agent's connection. Raises ``Unavailable`` if it has none."""
        if (connection := self.connection) is None:
            raise Unavailable(f"no daemon of {self.name}")
        return connection.welcome

    def let_go(self, request: str) -> None:
        """As ``give_back``, of a request that makes steps. They fetch what may be lent to it. If
        they end before that, no step is made for it: the lease ends at its time."""
        with self.lock:
            seq, _ = self.lookups.in_flight(request)
            self.give_back(request)
            if (channel := self._channel) is not None:
                channel.leave(seq)

    @property
    def owes(self) -> bool:
        """Whether there is something that a step should bring to the node, or is bringing, or
        something lent that only a step brings back."""
        with self.lock:
            connection, channel = self.connection, self._channel
            sent = channel is not None and (channel.sent or channel.settled)
            lent = (
                connection is not None
                and channel is not None
                and channel.may_lend(connection.requests.abandoned)
            )
            told = self._told is self.registration
            return bool(sent or lent or self._settled or self._steps or not told)

    @property
    def _channel(self) -> StepChannel | None:
        channel = None if self.connection is None else self.connection.channel
        assert channel is None or isinstance(channel, StepChannel)
        return channel

    def lose(self, connection: DaemonConnection, error: KvassError | None) -> None:
        if connection is self.connection and (channel := self._channel) is not None:
            self._settled += channel.settled
            self._boot, self.astray = connection.boot, self._alive
        super().lose(connection, error)

    def outgoing(self, step: int, ended: int) -> tuple[ToAgent, list[Settling]]:
        """What step number ``step`` brings to the agent, and what all ranks of the node give back.
        ``ended``: the last step that has ended."""
        with self.lock:
            to, channel = ToAgent(step=step, ended=ended, heard=self._heard), self._channel
            settled, self._settled = self._settled, []
            if channel is not None:
                to.epoch, to.messages, channel.sent = channel.epoch, channel.sent, []
                settled, channel.settled = settled + channel.settled, []
            if to.messages:
                self._number = step
                self._steps.append((step, [one.seq for one in to.messages], time.monotonic()))
            to.number = self._number
            if self._told is not self.registration or channel is None:
                if not any(isinstance(message, Register) for message in to.messages):
                    to.registration = self.registration
                self._told = self.registration
            return to, settled

    def arrived(self, news: FromAgent) -> None:
        """Take in what the agent returned. If a report before it was lost, the agent, which is told
        so, connects anew."""
        with self.lock:
            if news.epoch and news.welcome is None and news.count != self._heard + 1:
                return
            self._heard = news.count
            channel, self.failure = self._channel, news.failure
            if channel is not None and channel.epoch != news.epoch:
                assert self.connection is not None
                self._alive = False
                self.lose(self.connection, Unavailable(news.failure or "it is gone"))
                channel = None
            if news.welcome is not None and _alike(news.registered, self.registration):
                requests = OpenRequests()
                channel = StepChannel(news.epoch, requests.under_way)
                connection = DaemonConnection(channel, self.name)
                connection.requests = requests
                connection.welcome, connection.registration = news.welcome, self.registration
                connection.registered_s = time.monotonic()
                self.astray, self._alive = connection.boot == self._boot, True
                self._connected(connection)
            while self._steps and self._steps[0][0] <= news.number:
                _, seqs, began_s = self._steps.popleft()
                self.way_s = time.monotonic() - began_s
                if self.connection is not None:
                    self.connection.requests.under_way.difference_update(seqs)
            if channel is not None:
                channel.arrive(news.answers)
                self._read()

    def step_ended(self, ended: int) -> None:
        """Step number ``ended`` has ended. What the agent returned in it was taken in."""
        with self.lock:
            if self._steps and self._steps[0][0] <= ended:
                self._steps.clear()
                self.failure = "a step lost what its agent said"
                if self.connection is not None:
                    self.lose(self.connection, Unavailable(self.failure))


def _alike(one: Register | None, other: Register | None) -> bool:
    """Whether these are one registration, sent twice."""
    if one is None or other is None:
        return False
    return msgspec.structs.replace(one, seq=0) == msgspec.structs.replace(other, seq=0)
