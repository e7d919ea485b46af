"""What scripts tell of a machine: its effects, and what changed of the state that all can see."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import pytest

from kvass import messages as m
from kvass.core.adoption import Adoption
from kvass.core.effects import (
    Close,
    Effect,
    Event,
    HalfClose,
    Send,
    ToTier,
    Watch,
)
from kvass.types import DEFAULT_TENANT, PAGE
from tests.core.lives import Memory
from tests.core.rig import LEASE_S, WIDTH
from tests.core.spelling import (
    alike,
    joined,
    named,
    plain,
    ranges,
)
from tests.core.tier_rig import TierRig, names

_GAUGES: Final = ("rows", "leases", "reservations", "pins", "rows_loading")
_PAGES: Final = ("quarantined", "l1_resting", "l1_cleared", "l1_kept")
_COUNTED: Final = re.compile(
    r"(evicted|discarded|not_granted|tails|lapsed|promotions|flushes_lost|not_kept|lookups_|chunks_un"
    r"|session)"
)


class Seen(TierRig):
    """Keeps the effects of all its steps."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[Effect] = []
        super().__init__(*args, **options)

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        self.seen += effects
        return effects


class Teller:
    """A machine, who is connected to it, and the names of all that it gave."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.made: dict[str, Any] = {"tiers": 0, "core": {}}
        """The options of the machine."""
        self.memory: Memory | None = None
        self.adoption: Adoption | None = None
        self.rig = Seen(tiers=0)
        self.connections: dict[str, int] = {}
        self.terms: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, Any] = {}
        """What the names of leases, reservations and namespaces stand for."""
        self.slots: dict[str, tuple[Any, ...]] = {}
        self.asked: dict[tuple[int, int], m.FromClient] = {}
        """The requests that were not answered."""
        self.seq, self.out = 0, list[str]()
        self.snapshots: list[Any] = []

    # ------------------------------------------------------------ state

    def facts(self) -> dict[str, int]:
        status = self.rig.status
        of_groups = [g for ns in status["namespaces"] for g in ns["groups"]]
        facts = {name.removeprefix("rows_"): status[name] for name in _GAUGES}
        facts["writing"] = sum(g["rows_writing"] for g in of_groups)
        facts["waiting"] = status["promotions"]
        facts |= {name.removeprefix("l1_"): status[f"{name}_bytes"] // PAGE for name in _PAGES}
        facts["indexed"] = status["indexed_chunks"]
        facts["engines"], facts["namespaces"] = status["instances"], len(status["namespaces"])
        if any(t["quota"] for t in status["tenants"]):
            facts |= {f"pages of {t['tenant']}": t["l1_bytes"] // PAGE for t in status["tenants"]}
        for tier in status["tiers"]:
            facts[f"queued for {tier['tier']}"] = tier["flush_queue_rows"]
        return facts | {f"+{n}": c for n, c in status["counters"].items() if _COUNTED.match(n)}

    def changes(self, before: dict[str, int]) -> str:
        after = self.facts()
        return ", ".join(
            f"{n[1:]} +{c - before.get(n, 0)}" if n[0] == "+" else f"{n} {c}"
            for n, c in after.items()
            if c != before.get(n, 0) and not (n[0] == "+" and c < before.get(n, 0))
        )

    # ------------------------------------------------------------ effects

    def tell(self, speaker: str = "", hide: type | tuple[()] = ()) -> None:
        """Write down the effects since the last call; what ``speaker`` is told, as an answer."""
        effects, self.rig.seen = self.rig.seen, []
        for effect in effects:
            if isinstance(effect, Send):
                text = self.message(effect)
                who = self.name(effect.connection)
                if text and not isinstance(effect.message, hide):
                    self.out.append(text if who == speaker else f"{who}: {text}")
            else:
                self.out.append(self.effect(effect))

    def name(self, connection: int) -> str:
        return next(
            (n for n, s in self.connections.items() if s == connection), f"session {connection}"
        )

    def effect(self, effect: Effect) -> str:
        match effect:
            case Close():
                return f"{self.name(effect.connection)} closed"
            case HalfClose():
                return f"{self.name(effect.connection)} half-closed"
            case Watch():
                until = effect.until - self.rig.now
                how = "until its end" if math.isinf(until) else f"for {until:g}s"
                return f"{self.name(effect.connection)} watched {how}"
        if not isinstance(effect, ToTier):
            return str(effect)
        what: Any = effect
        records = getattr(what, "batches", None) or [r for r in (getattr(what, "records", 0),) if r]
        text = f"t{what.tier} {type(what).__name__.removeprefix('Tier').lower()}"
        for each in records:
            chunks = ranges(one[3].rstrip(b"\0").decode() for one in names(each))
            text += f"{' +' if each is not records[0] else ''} {chunks}"
            text += f" of group {each.group}" if each.group else ""
        if hasattr(what, "renew"):
            text += f" of {self.known('n', what.namespace)}" + (", renewed" if what.renew else "")
        if getattr(what, "tenant", DEFAULT_TENANT) != DEFAULT_TENANT:
            text += f" for {what.tenant}"
        return text

    def known(self, letter: str, value: Any) -> str:
        """The name of a lease, a reservation or a namespace."""
        for name, number in self.numbers.items():
            if name[0] == letter and number == value:
                return name
        count = sum(re.fullmatch(letter + r"\d+", other) is not None for other in self.numbers)
        name = f"{letter}{count + 1}"
        self.numbers[name] = value
        return name

    def message(self, effect: Send) -> str:
        reply, asked = effect.message, None
        if isinstance(reply, m.Promoting):
            assert (effect.connection, reply.seq) in self.asked
            return "waits"
        if reply.seq:
            asked = self.asked.get((effect.connection, reply.seq))
            assert asked is not None, f"answered twice, or not asked: {reply}"
            del self.asked[effect.connection, reply.seq]
        match reply:
            case m.Error():
                how = "ended" if reply.fatal else "refused"
                return f"{how}, {reply.code}: {reply.text}"
            case m.Matched():
                return self.matched(reply, asked)
            case m.Granted():
                return "; ".join(
                    self.granted(grant, item)
                    for grant, item in zip(reply.grants, asked.items, strict=True)  # type: ignore[union-attr]
                )
            case m.Registered():
                missing = " ".join(map(str, reply.missing))
                return f"missing {missing}" if missing else self.known("n", reply.namespace)
            case m.Welcome():
                populated = f"{reply.populated_bytes // PAGE} pages populated"
                told = ["the arena"] * effect.with_arena + [populated] * bool(reply.populated_bytes)
                return f"Welcome, {', '.join(told)}" if told else ""
        return plain(reply)

    def matched(self, found: m.Matched, asked: Any) -> str:
        text = f"{found.first}.." if found.first else ""
        text += f"{found.chunks}/{len(asked.digests) // (asked.width or WIDTH)}"
        text += f"+{found.blocks} blocks" if found.blocks else ""
        if len(found.slots) > 1:
            text += f" [{' '.join(str(len(s)) for s in found.slots)}]"
        text += f", kept {found.kept}" if found.kept else ""
        text += f", whole {found.whole}" if found.whole > found.chunks else ""
        for tier, count in enumerate(found.tiers):
            text += f", {count} tokens from t{tier}" if count else ""
        text += f", {found.why}" if found.why else ""
        if not found.lease:
            return text
        assert (found.boot, found.given_s) == (self.rig.machine.state.config.boot, self.rig.now)
        assert found.deadline_s == self.rig.now + LEASE_S
        name = self.known("l", found.lease)
        self.slots[name] = found.slots
        return f"{text}, {name}"

    def granted(self, grant: m.Grant, item: m.ReserveItem, unnamed: bool = False) -> str:
        wanted = named(item.digests)
        text = "nothing"
        if grant.reservation:
            name = "stored" if unnamed else self.known("r", grant.reservation)
            self.slots[name] = grant.slots
            rows = [
                ranges((*wanted, "tail")[i] for i in chunks) or "none" for chunks in grant.rows()
            ]
            text = f"{name} {rows[0] if len({*rows}) == 1 else ' | '.join(rows)}"
        if grant.refused:
            text += f", refused {ranges(wanted[i] for i in grant.refused)}"
        text += f", kept {grant.kept}" if grant.kept else ""
        text += f", later from {wanted[grant.later]}" if grant.later >= 0 else ""
        return text + (f", refused: {grant.error}" if grant.error else "")

    # ------------------------------------------------------------ as text

    def collapsed(self) -> list[str]:
        """The outcomes; those that differ in the numbers of names only, as one."""
        found: list[list[list[str]]] = []
        for text in self.out:
            words = text.split(" ")
            if found and len(found[-1][0]) == len(words) and all(map(alike, words, found[-1][0])):
                found[-1].append(words)
            else:
                found.append([words])
        texts = [" ".join(map(joined, zip(*alikes, strict=True))) for alikes in found]
        return [
            text if len(alikes) == 1 else f"{len(alikes)}x {f'({text})' if ';' in text else text}"
            for text, alikes in zip(texts, found, strict=True)
        ]
