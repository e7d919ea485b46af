"""Workers of this life and of former lives, as the saved index knows them.

Law of this file: a worker is noted in the index before it may be granted a slot, and forgotten when
it can no longer write (law 13). Where nothing outlives the daemon, these functions do nothing.
"""

from __future__ import annotations

from typing import Any, Final

from kvass.core.clients.registry import ClientConnection, Instance
from kvass.core.effects import FormerEnded
from kvass.core.handlers.checks import check_boot
from kvass.core.pending.settlement import FORMER, former_connection
from kvass.core.saved.processes import PLACES, who
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import Drained, Register
from kvass.types import SCHEDULER

_PIDS: Final = 64
"""The most processes that ``resting`` names."""


def note(state: State, connection: ClientConnection, terms: Register) -> None:
    """Note the process of a worker that registers.

    Raises:
        Refused: ``limit``, if too many processes may still write.
    """
    if state.index is None or terms.rank == SCHEDULER:
        return
    name = who(terms.instance, terms.rank)
    if not state.index.processes.note_worker(connection.id, connection.pid, connection.start, name):
        raise Refused("limit", f"{PLACES} processes may still write to L1: end some")


def lost(state: State, connection: ClientConnection) -> None:
    """A connection ended. ``sweep`` forgets its process when its device can no longer write."""
    if state.index is not None:
        state.lost_workers.add(connection.id)


def sweep(state: State) -> None:
    if state.index is None:
        return
    if state.lost_workers:
        done = state.lost_workers - state.settlement.may_write
        state.lost_workers -= done
        for connection in done:
            state.index.processes.forget_worker(connection)
    if (
        state.unseen
        and state.now > state.config.started_s + state.config.timing.lost_engine_grace_s
    ):
        for number in state.unseen:
            state.index.processes.former_ended(number)
        state.unseen = ()


def drained(state: State, connection: ClientConnection, msg: Drained) -> None:
    """The worker has no copy of a former life under way any more."""
    check_boot(state, msg.boot)
    who_says = connection.registered
    if who_says is None or who_says.rank == SCHEDULER:
        raise Refused("bad_rank", "drained: only a worker says that")
    if state.index is not None:
        processes, name = state.index.processes, who(who_says.instance, who_says.rank)
        for number in processes.former_of({name: connection.pid}):
            state.settlement.drained(number)
            processes.former_ended(number)


def resting_for(state: State, instance: Instance) -> int:
    """The bytes that rest because a worker of ``instance`` may still write to them on behalf of a
    former life. They count towards what the instance may reserve (law 12): otherwise one that never
    says ``Drained`` would have more of L1 rest after each restart."""
    if state.index is None or not state.reservations.of(FORMER):
        return 0
    ranks = instance.connections.items()  # no process has the name of a scheduler
    pids = {who(instance.id, rank): state.connections[connection].pid for rank, connection in ranks}
    numbers = state.index.processes.former_of(pids)
    return state.settlement.resting_for(numbers) if numbers else 0


def resting(state: State) -> dict[str, Any]:
    """What rests because of a former life, for ``kvass status``. ``resting_bytes``: of L1;
    ``resting_s``: in how many seconds it is free at the latest, or ``None`` if that depends on
    processes; ``resting_pids``: these processes, which may still write."""
    settlement, written = state.settlement, state.reservations.of(FORMER)
    former = state.index.processes.former() if state.index is not None and written else ()
    pids = sorted({each.pid for each in former if each.pid})
    ends = [each.deadline for each in (*state.leases.of(FORMER).values(), *written.values())]
    left_s = max(0.0, round(max(ends, default=state.now) - state.now, 1))
    return {
        "resting_bytes": settlement.resting_bytes,
        "resting_s": None if pids else left_s,
        "resting_pids": pids[:_PIDS],
    }


def ended(state: State, event: FormerEnded) -> None:
    assert state.index is not None, "there was no former life"
    state.settlement.process_ended(former_connection(event.number))
    state.index.processes.former_ended(event.number)
