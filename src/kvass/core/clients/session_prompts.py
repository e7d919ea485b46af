"""Which chunks the last prompt of each client's session had, also after their rows left L1.

Laws of this file:

- It takes ``MOST_BYTES`` at most, and a prompt ``PROMPT_BYTES`` (law 12). If there is too much, the
  payer with the most loses the prompt that was used longest ago. So no payer takes what others
  have, whatever names its clients invent.
- What one call does takes no longer if more sessions are remembered.
- What is remembered says nothing of rows. Only keys are here; whoever uses them looks for rows.
- A prompt is of an epoch of its namespace: after a clear nobody uses it, and it makes room in its
  turn. A namespace that was removed to make room may come back with its id, and tiers may have its
  rows.

A prompt is a chain: each key stands for all tokens before it. So it is one prompt for each session
and namespace, and a prompt that another one continues needs no place of its own. Nothing here
survives a restart.
"""

from __future__ import annotations

from math import inf
from typing import Final

import msgspec

from kvass.core.agenda import Agenda
from kvass.types import U64Array

MOST_BYTES: Final = 32 << 20
PROMPT_BYTES: Final = 1 << 20
"""32,768 chunks: 8 million tokens in chunks of 256."""
ENTRY_BYTES: Final = 1024
"""Memory of a prompt without its keys."""
SOON_S: Final = 0.5
"""A session that is fetched, and did not say when it comes back, does so in this time."""
_Due = tuple[float, int, int, int]
"""When, payer, tag, namespace."""


class SessionPrompt(msgspec.Struct, eq=False):
    """The chunks of the last prompt of the session ``tag`` in the namespace with the id
    ``namespace``, in its epoch ``epoch``. ``payer``: the id of the tenant that pays for the
    session's rows, and ``tenant`` its name in requests.

    ``since_s``: when the first of its prompts came. ``ready_s``: when all its rows were seen to be
    READY. ``fetch_s``: when to fetch them. ``due``: when to let them go, to fetch them, or to go on
    with that; None: nobody said. ``fetches``: it is due to be fetched. ``until``: when that is
    given up. ``early_s``: how long before the session comes back it is fetched, about. ``had``: how
    many chunks L1 had when the last part began to load; -1: none did. ``needs_bytes``: how much
    room the next part needs, as was seen when it was looked up. ``looks_s``: when it is looked up
    again. ``gap_s``: how long the last part had to wait.
    """

    tag: int
    namespace: int
    payer: int
    tenant: str
    keys: U64Array
    epoch: int = 0
    since_s: float = inf
    ready_s: float = inf
    fetch_s: float = 0.0
    due: float | None = None
    fetches: bool = False
    early_s: float = SOON_S
    until: float = 0.0
    had: int = -1
    needs_bytes: int = 0
    looks_s: float = 0.0
    gap_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + self.keys.nbytes


class SessionPrompts:
    """The prompts of all sessions."""

    def __init__(self) -> None:
        self.bytes = self._prompts = 0
        self.rests_until = 0.0
        """Nothing is fetched before."""
        self._of: dict[int, dict[int, dict[int, SessionPrompt]]] = {}
        """By payer, then by tag, then by namespace. What was used longest ago is first."""
        self._bytes_of: dict[int, int] = {}
        self._let_go = Agenda[_Due]()
        self._fetch: dict[int, Agenda[_Due]] = {}
        """By payer, those to fetch."""
        self._turns: dict[int, float] = {}
        """By payer, when its last turn was."""
        self._next_of: dict[int, _Due] = {}
        """By payer, the first of them, with the time of the payer's last turn if that is later."""
        self._firsts = Agenda[_Due]()
        """The same, in order: so payers take turns."""

    def __len__(self) -> int:
        return self._prompts

    def of(self, tag: int, payer: int) -> list[SessionPrompt]:
        """The prompts of a session, one for each namespace. The one used last is last."""
        return [*self._of.get(payer, {}).get(tag, {}).values()]

    def remember(
        self, tag: int, namespace: int, payer: int, tenant: str, keys: U64Array, epoch: int = 0
    ) -> SessionPrompt:
        """A request of the session has the chunks ``keys``, one at least. Nothing of it is due.

        If its payer has most, and nothing else, it may be forgotten at once."""
        sessions = self._of.setdefault(payer, {})
        mine = sessions[tag] = sessions.pop(tag, {})
        prompt = mine.pop(namespace, None)
        if prompt is None:
            prompt = SessionPrompt(tag, namespace, payer, tenant, keys[:0].copy())
            self._prompts += 1
            self._count(payer, ENTRY_BYTES)
        mine[namespace] = prompt
        keys = keys[: PROMPT_BYTES // keys[:1].nbytes]
        n, old = len(keys), prompt.keys
        if n > len(old) or prompt.epoch != epoch or (old[n - 1] != keys[-1]).any():
            self._count(payer, keys.nbytes - old.nbytes)
            prompt.keys = keys.copy()  # not a view of a whole message
        prompt.epoch, prompt.had, prompt.until, prompt.early_s = epoch, -1, 0.0, SOON_S
        prompt.ready_s, prompt.looks_s = inf, 0.0
        self.wake_at(prompt, None)
        while self.bytes > MOST_BYTES:
            self._drop_one()
        return prompt

    def wake_at(self, prompt: SessionPrompt, due: float | None) -> None:
        """Have ``prompt`` be due at ``due``, and at no other time. One that was forgotten is never
        due."""
        sessions = self._of.get(prompt.payer, {})
        if sessions.get(prompt.tag, {}).get(prompt.namespace) is not prompt:
            return
        if prompt.due is not None:
            self._agenda(prompt).remove(_entry(prompt, prompt.due))
            self._line_up(prompt.payer)
        prompt.due, prompt.fetches = due, due is not None and due >= prompt.fetch_s
        if due is not None:
            self._agenda(prompt).add(_entry(prompt, due))
            self._line_up(prompt.payer)

    def had_turn(self, payer: int, now: float) -> None:
        """A fetch of a payer begins, or finds no room: those of others that are due come before its
        next one."""
        self._turns[payer] = now
        self._line_up(payer)

    @property
    def next_due(self) -> float | None:
        """When the next prompt is due; ``None`` if none is."""
        return min(due)[0] if (due := self._next()) else None

    def take_due(self, now: float) -> SessionPrompt | None:
        """The prompt that has been due longest, of those to fetch by the turns of their payers. It
        is not due any more."""
        if not (due := self._next()) or min(due)[0] > now:
            return None
        _, _, (_, payer, tag, namespace) = min(due)
        prompt = self._of[payer][tag][namespace]
        assert prompt.due is not None, "a prompt that was forgotten is due"
        self.wake_at(prompt, None)
        return prompt

    def _next(self) -> list[tuple[float, int, _Due]]:
        """When the first of those to let go is due, and of those to fetch."""
        firsts = (0, self._let_go.first), (1, self._firsts.first)
        return [(max(f[0], self.rests_until * i), i, f) for i, f in firsts if f is not None]

    def _agenda(self, prompt: SessionPrompt) -> Agenda[_Due]:
        if not prompt.fetches:
            return self._let_go
        return self._fetch.setdefault(prompt.payer, Agenda())

    def _line_up(self, payer: int) -> None:
        """Have the first of a payer's prompts that are to be fetched wait for its turn."""
        if (before := self._next_of.pop(payer, None)) is not None:
            self._firsts.remove(before)
        if payer in self._fetch and (first := self._fetch[payer].first) is not None:
            self._next_of[payer] = max(first[0], self._turns.get(payer, 0.0)), *first[1:]
            self._firsts.add(self._next_of[payer])

    def _count(self, payer: int, size: int) -> None:
        self.bytes += size
        self._bytes_of[payer] = self._bytes_of.get(payer, 0) + size

    def _drop_one(self) -> None:
        most = max(self._bytes_of, key=self._bytes_of.__getitem__)
        self._drop(next(iter(next(iter(self._of[most].values())).values())))

    def _drop(self, prompt: SessionPrompt) -> None:
        self.wake_at(prompt, None)
        mine = self._of[prompt.payer][prompt.tag]
        del mine[prompt.namespace]
        if not mine:
            del self._of[prompt.payer][prompt.tag]
        self._prompts -= 1
        self._count(prompt.payer, -prompt.size_bytes)


def _entry(prompt: SessionPrompt, due: float) -> _Due:
    return due, prompt.payer, prompt.tag, prompt.namespace
