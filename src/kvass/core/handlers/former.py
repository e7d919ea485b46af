"""Workers of this life and of former lives, as the saved index knows them.

Law of this file: a worker is noted in the index before it may be granted a slot, and forgotten when
it can no longer write (law 13). Where nothing outlives the daemon, these functions do nothing.
"""

from __future__ import annotations

from kvass.core.clients.registry import ClientSession, Instance
from kvass.core.effects import FormerEnded
from kvass.core.handlers.checks import check_boot
from kvass.core.pending.settlement import FORMER, former_session
from kvass.core.saved.processes import PLACES, who
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import Drained, Register
from kvass.types import SCHEDULER


def note(state: State, session: ClientSession, terms: Register) -> None:
    """Note the process of a worker that registers.

    Raises:
        Refused: ``limit``, if too many processes may still write.
    """
    if state.index is None or terms.rank == SCHEDULER:
        return
    name = who(terms.instance, terms.rank)
    if not state.index.processes.note_worker(session.id, session.pid, session.start, name):
        raise Refused("limit", f"{PLACES} processes may still write to L1: end some")


def lost(state: State, session: ClientSession) -> None:
    """A session ended. ``sweep`` forgets its process when its device can no longer write."""
    if state.index is not None:
        state.lost_workers.add(session.id)


def sweep(state: State) -> None:
    """Forget the workers that can no longer write."""
    if state.index is None:
        return
    if state.lost_workers:
        done = state.lost_workers - state.settlement.may_write
        state.lost_workers -= done
        for session in done:
            state.index.processes.forget_worker(session)
    if state.unseen and state.now > state.config.started_s + state.config.timing.dma_grace_s:
        for number in state.unseen:
            state.index.processes.former_ended(number)
        state.unseen = ()


def drained(state: State, session: ClientSession, msg: Drained) -> None:
    """The worker has no copy of a former life under way any more."""
    check_boot(state, msg.boot)
    who_says = session.registered
    if who_says is None or who_says.rank == SCHEDULER:
        raise Refused("bad_rank", "drained: only a worker says that")
    if state.index is not None:
        processes, name = state.index.processes, who(who_says.instance, who_says.rank)
        for number in processes.former_named(name, session.pid):
            state.settlement.drained(number)
            processes.former_ended(number)


def resting_for(state: State, instance: Instance) -> int:
    """The bytes that rest because a worker of ``instance`` may still write to them on behalf of a
    former life. They count towards what the instance may reserve (law 12): otherwise one that never
    says ``Drained`` would have more of L1 rest after each restart."""
    if state.index is None or not state.reservations.of(FORMER):
        return 0
    processes, numbers = state.index.processes, list[int]()
    for rank, session in instance.sessions.items():  # no process has the name of a scheduler
        name = who(instance.id, rank)
        numbers += processes.former_named(name, state.sessions[session].pid)
    return state.settlement.resting_for(numbers)


def ended(state: State, event: FormerEnded) -> None:
    """The process of a former worker has ended."""
    assert state.index is not None, "there was no former life"
    state.settlement.process_ended(former_session(event.number))
    state.index.processes.former_ended(event.number)
