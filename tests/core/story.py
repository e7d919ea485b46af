"""What the commands of a story speak to: a machine, and everybody who is connected to it.

A command is a method: ``do_`` and its name of what happens, ``say_`` and its name of what somebody
says. ``tests/core/scripts/README.md`` has them all.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable
from typing import Any, Final

from msgspec import inspect

import kvass.core
from kvass import messages as m
from kvass.core.effects import (
    Event,
    Faulted,
    FormerEnded,
    Lost,
    Opened,
    PopulatedTo,
    ProcessEnded,
    QuotasAre,
    Received,
    Send,
    Stopping,
    Tick,
    TierReport,
    TiersAre,
)
from kvass.core.machine import CoreConfig
from kvass.core.saved.index_file import SavedIndex
from kvass.types import PAGE, Timing
from tests.core.lives import Memory
from tests.core.rig import BOOT, GRACE_S, LEASE_S, RESERVE_S, WIDTH, digests, key
from tests.core.spelling import (
    Prompt,
    chunks_of,
    groups,
    named,
    plainly,
    quota,
    ranges,
    shown,
    spelled,
    tokens,
    typed,
)
from tests.core.telling import Seen, Teller

_KINDS: Final = {"commit": m.Commit, "abort": m.Abort, "release": m.Release}
_ANSWERS: Final = ("yes", "no", "first", "last")


class Story(Teller):
    """What the commands of one story speak to."""

    # ------------------------------------------------------------ a line

    def run(self, line: str) -> tuple[list[str], str]:
        """What came of a line, and what changed."""
        before = self.facts()
        self.out = []
        for command in line.split(" / "):
            if found := re.match(r"(\d+)x (.*)", command):
                earlier, every = self.out, list[str]()
                for i in range(int(found[1])):
                    self.out = []
                    self.command(found[2].replace("{i}", str(i)).split())
                    self.tell()
                    every += ["; ".join(self.out)] if self.out else []
                self.out = earlier + every
            else:
                self.command(command.split())
                self.tell()
            if command.startswith(("engine", "ready")):
                before |= {name: self.facts()[name] for name in ("engines", "namespaces")}
        return self.collapsed(), self.changes(before)

    def command(self, words: list[str]) -> None:
        if re.fullmatch(r"\+[\d.]+s", words[0]):
            self.rig.wait(float(words[0][1:-1]))
        elif (do := getattr(self, f"do_{words[0].replace('-', '_')}", None)) is not None:
            do(*words[1:])
        else:
            spoken = [i for i, word in enumerate(words) if not self.who(word)]
            if spoken[:1] in ([], [0]):
                raise ValueError("no such session or command")
            for who in [s for word in words[: spoken[0]] for s in self.who(word)]:
                self.speak(who, words[spoken[0]], words[spoken[0] + 1 :])

    def who(self, word: str) -> list[str]:
        """The connections that a word names: ``A``, ``A.0``, ``A.*``."""
        if word.endswith(".*"):
            return [name for name in self.connections if name.startswith(word[:-1])]
        return [word] if word in self.connections else []

    # ------------------------------------------------------------ what connections say

    def step(self, event: Event, speaker: str = "") -> None:
        self.rig.step(event)
        self.tell(speaker)

    def say(self, who: str, message: m.FromClient, hide: type | tuple[()] = ()) -> list[Any]:
        """Send a message, and write its answers down but for those of type ``hide``."""
        connection = self.connections[who]
        self.seq += 1
        message.seq = self.seq
        self.asked[connection, self.seq] = message  # one-way messages are answered by errors alone
        self.rig.step(Received(connection, message))
        replies = [
            e.message for e in self.rig.seen if isinstance(e, Send) and e.connection == connection
        ]
        self.tell(who, hide)
        return replies

    def build(self, kind: Any, words: Iterable[str], **more: Any) -> Any:
        """A message: ``field=value``; other words are chunks, or flags that are set."""
        info: Any = inspect.type_info(kind)
        fields = {field.name: field.type for field in info.fields}
        given: dict[str, Any] = dict(more)
        bare = []
        for word in spelled(words):
            name, equals, text = word.partition("=")
            if name == "tail":
                given["blocks"] = digests(*Prompt(text).rest)
            elif name in fields and (equals or isinstance(fields[name], inspect.BoolType)):
                given[name] = self.value(fields[name], text) if equals else True
            else:
                bare.append(word)
        defaults = {"request": "r", "width": WIDTH, "boot": self.rig.machine.state.config.boot}
        given = {n: v for n, v in defaults.items() if n in fields} | given
        if bare and "digests" in fields:
            given = chunks_of(bare, kind, given)
        else:
            assert not bare, f"{kind.__name__}: no {bare}"
            if "digests" in fields:
                given.setdefault("digests", b"")
        return kind(**given)

    def value(self, kind: inspect.Type, text: str) -> Any:
        if text not in self.numbers:
            return typed(kind, text)
        number = self.numbers[text]
        return (number,) if isinstance(kind, inspect.VarTupleType) else number

    def speak(self, who: str, verb: str, words: list[str]) -> None:
        if verb in _KINDS:
            for word in spelled(words):
                self.settle(_KINDS[verb], who, self.numbers[word])
        elif (do := getattr(self, f"say_{verb}", None)) is not None:
            do(who, words)
        else:
            self.say(who, self.build(getattr(m, verb[0].upper() + verb[1:]), words))

    def say_holds(self, who: str, words: list[str]) -> None:
        """A lookup whose lease is given back."""
        message = self.build(m.Lookup, words)
        (found,) = self.say(who, message, hide=m.Matched)
        if found.lease:
            self.say(who, m.Release(boot=BOOT, lease=found.lease))
        found.lease = 0
        self.out.append(self.matched(found, message))

    def say_finds(self, who: str, words: list[str]) -> None:
        """Which prompts of one chunk match."""
        options = [word for word in words if "=" in word]
        there = []
        for name in spelled(word for word in words if "=" not in word):
            (found,) = self.say(who, self.build(m.Lookup, [name, *options]), hide=m.Matched)
            if found.lease:
                there.append(name)
                self.say(who, m.Release(boot=BOOT, lease=found.lease))
        self.out.append(ranges(there) or "none")

    def items(self, words: list[str]) -> list[m.ReserveItem]:
        """Items, with ``;`` between them."""
        return [self.build(m.ReserveItem, part.split()) for part in " ".join(words).split(";")]

    def say_reserve(self, who: str, words: list[str]) -> None:
        self.say(who, m.Reserve(items=self.items(words), width=WIDTH))

    def say_begin(self, who: str, words: list[str]) -> None:
        """Reserve, and hand over."""
        (reply,) = self.say(who, m.Reserve(items=self.items(words), width=WIDTH))
        given = tuple(grant.reservation for grant in reply.grants if grant.reservation)
        self.say(who, m.HandedOver(boot=BOOT, reservations=given))

    def say_store(self, who: str, words: list[str]) -> None:
        """Begin, and commit by every rank. The grant is shown unless it is of all chunks."""
        items = self.items(words)
        (reply,) = self.say(who, m.Reserve(items=items, width=WIDTH), hide=m.Granted)
        for grant, item in zip(reply.grants, items, strict=True):
            count = len(item.digests) // WIDTH - item.first
            whole = grant.reservation and len(grant.chunks) == count
            text = self.granted(grant, item, unnamed=True)
            if not whole or grant.kept or grant.error or "tail" in text:
                self.out.append(text)
            if grant.reservation:
                self.say(who, m.HandedOver(boot=BOOT, reservations=(grant.reservation,)))
                for worker in self.who(f"{who}.*")[:: self.replicas(who)]:
                    self.settle(m.Commit, worker, grant.reservation)

    def say_each(self, who: str, words: list[str]) -> None:
        """Store prompts of one chunk."""
        options = [word for word in words if "=" in word]
        for name in spelled(word for word in words if "=" not in word):
            self.say_store(who, [name, *options])

    def settle(self, kind: Any, who: str, number: int) -> None:
        rank = int(who.partition(".")[2]) if "." in who else -1
        name = "lease" if kind is m.Release else "reservation"
        self.say(who, kind(boot=BOOT, rank=rank, **{name: number}))

    def say_hands(self, who: str, words: list[str]) -> None:
        """Hand leases and reservations over to the ranks."""
        every = [*spelled(words)]
        leases, grants = (
            tuple(self.numbers[word] for word in every if word[0] == letter) for letter in "lr"
        )
        self.say(who, m.HandedOver(boot=BOOT, leases=leases, reservations=grants))

    def say_register(self, who: str, words: list[str]) -> None:
        self.say(who, self.build(m.Register, words, **self.terms_of(who)))

    def say_moves(self, who: str, words: list[str]) -> None:
        """The engine's weights were replaced: another generation."""
        self.terms[who]["generation"] = words[0].encode()
        self.say(who, self.build(m.Register, words[1:], **self.terms_of(who)))

    def say_indexes(self, who: str, words: list[str]) -> None:
        """Index chunks by their tokens: those that follow from their names."""
        chunks = spelled(word for word in words if "=" not in word)
        message = self.build(m.IndexChunks, words, space=b"", tokens=tokens(chunks))
        if message.predecessor:
            message.predecessor = key(message.predecessor.decode())
        self.say(who, message)

    def say_searches(self, who: str, words: list[str]) -> None:
        """Find chunks in a prompt. A number is that many other tokens."""
        text = b"".join(
            bytes(4 * int(word)) if word.isdigit() else tokens([word])
            for word in spelled(word for word in words if "=" not in word)
        )
        options = [word for word in words if "=" in word]
        message = self.build(m.FindSegments, options, space=b"", tokens=text)
        (found,) = self.say(who, message, hide=m.Segments)
        if isinstance(found, m.Segments):
            left, parts = named(found.digests), []
            for one in found.segments:
                count = one.length // 16
                was = f"{one.old_start} after {named(one.predecessor)[0]}" if one.old_start else "0"
                parts.append(f"{ranges(left[:count])} at {one.new_start}, was at {was}")
                left = left[count:]
            self.out.append(" + ".join(parts) or "nothing")

    def say_removals(self, who: str, words: list[str]) -> None:
        """Which rows left since the last answer, and which of these are there, by group (``|``)."""
        present = tuple(digests(*part.split()) for part in " ".join(words).split("|"))
        message = m.Removals(since=self.numbers.get(f"upto {who}", 0), width=WIDTH, present=present)
        (reply,) = self.say(who, message, hide=m.Removed)
        if isinstance(reply, m.Removed):
            self.numbers[f"upto {who}"] = reply.upto
            gone = " | ".join(ranges(sorted(named(blob))) for blob in reply.removed)
            held = " | ".join(" ".join(map(str, blob)) for blob in reply.present)
            lost = "lost, " if reply.lost else ""
            self.out.append(f"{lost}removed {gone or 'none'}" + (f", there {held}" if held else ""))

    def say_reports(self, who: str, words: list[str]) -> None:
        """What came of a lookup: tokens that were looked up, and hit. ``speed``: of a prefill."""
        numbers = [int(word) for word in words if word.isdigit()]
        options = [word for word in words if not word.isdigit() and "speed=" not in word]
        speed = sum(float(word.partition("=")[2]) for word in words if "speed=" in word)
        fields = dict(zip(("lookup_tokens", "hit_tokens"), numbers, strict=False))
        results = (self.build(m.LookupResult, options, **fields),) if numbers else ()
        self.say(who, m.HandedOver(boot=BOOT, results=results, prefill_tokens_s=speed))

    def say_notes(self, who: str, words: list[str]) -> None:
        """What an engine adds to the log of lookups. ``when_s`` counts from now."""
        note = self.build(m.LookupNote, words)
        note.when_s += self.rig.now
        self.say(who, m.LookupNotes(boot=BOOT, notes=(note,)))

    # ------------------------------------------------------------ the machine and its connections

    def do_machine(self, *words: str) -> None:
        """Options of the core, its limits and times. ``lasting``: what it knows outlives it."""
        self.made = {"tiers": 0, "core": {}}
        self.change(words)
        self.memory = Memory(self.made.get("pages", 64)) if "lasting" in words else None
        lasting = {"index": self.memory.create()} if self.memory else {}
        self.rig = Seen(**self.made, **lasting)

    def change(self, words: Iterable[str]) -> None:
        """Other options of the machine."""
        core, seconds = self.made["core"], dict[str, float]()
        for name, equals, text in (word.partition("=") for word in words):
            if name == "quotas":
                core[name] = tuple(quota(each) for each in text.split(",") if each)
            elif name in CoreConfig.__struct_fields__ and name != "tiers":
                core[name] = plainly(text)
            elif name in Timing.__struct_fields__:
                seconds[name] = float(text)
            elif equals:
                self.made[name] = plainly(text)
        if seconds:
            standard = {"lease_s": LEASE_S, "reserve_s": RESERVE_S, "lost_engine_grace_s": GRACE_S}
            core["timing"] = Timing(**standard | seconds)

    def do_next_life(self, *words: str) -> None:
        """The daemon is killed, or ends in order (``stopped``), and the next one starts."""
        assert self.memory is not None
        if "stopped" in words:
            self.rig.machine.end()
        self.change(word for word in words if "=" in word)
        now = self.rig.now
        self.made["core"]["started_s"] = now
        found = self.memory.open(self.made.get("pages", 64))
        index = found if isinstance(found, SavedIndex) else self.memory.create()
        self.rig = Seen(**self.made, now=now, index=index)
        self.rig.machine.validate()
        self.connections, self.asked = {}, {}
        self.adoption = made = self.rig.machine.adoption
        assert made is not None
        said = f"adopted {made.rows} rows" + (f", {made.lent} lent" if made.lent else "")
        said += f", {made.dropped} dropped" if made.dropped else ""
        pids = " ".join(str(each.pid) for each in made.former if each.pid)
        self.out.append(f"{said}, waits for process {pids}" if pids else said)

    def do_former(self, pid: str) -> None:
        """A worker of a former life has ended."""
        assert self.adoption is not None
        (number,) = [each.number for each in self.adoption.former if each.pid == int(pid)]
        self.step(FormerEnded(number))

    def do_limit(self, place: str, value: str) -> None:
        """Another value for a constant of a file of the core."""
        file, _, name = place.partition(".")
        every = pkgutil.walk_packages(kvass.core.__path__, "kvass.core.")
        (module,) = [one.name for one in every if one.name.endswith(f".{file}")]
        self.patch.setattr(importlib.import_module(module), name, plainly(value))

    def terms_of(self, who: str) -> dict[str, Any]:
        engine, _, rank = who.partition(".")
        known = self.terms.get(engine, {})
        fields = {k: v for k, v in known.items() if k not in ("layout", "stages")}
        fields = {"instance": engine, "identity": {"model": "m"}, "chunk_tokens": 16, **fields}
        if rank:
            shapes, replicas = known.get("stages", [groups("full")]), self.replicas(engine)
            shard = int(rank) // replicas
            fields |= {"rank": int(rank), "shard": shard, "layout": shapes[shard % len(shapes)]}
            fields["writer"] = int(rank) % replicas == 0
            fields.pop("generation", None)
        return fields

    def replicas(self, engine: str) -> int:
        """How many ranks hold each shard."""
        terms = self.terms.get(engine, {})
        return int(terms.get("ranks", 1)) // int(terms.get("world_size", 1))

    def do_engine(self, *words: str) -> None:
        """Engines of these names."""
        named = [word for word in words if "=" not in word and word != "own"]
        for name in named:
            self.engine(name, [word for word in words if word not in named])

    def engine(self, name: str, words: list[str]) -> None:
        """A scheduler and its ranks. ``ranks``, ``replicas``: ranks of one shard; ``groups``:
        layer groups, those of the stages with ``/``; ``model``; other fields of ``Register``."""
        fields: dict[str, Any] = {"ranks": 1}
        opened: dict[str, Any] = {}
        stages = [groups("full")]
        rest = []
        replicas = 1
        for word in words:
            field, _, text = word.partition("=")
            if field == "ranks":
                fields["ranks"] = int(text)
            elif field == "replicas":
                replicas = int(text)
            elif field == "groups":
                stages = [groups(each) for each in text.split(";")]
            elif field == "model":
                fields["identity"] = {"model": text}
            elif field in ("uid", "own", "pid"):
                opened[field] = int(text or 1)
            else:
                rest.append(word)
        fields |= {"world_size": fields["ranks"] // replicas, "stages": stages}
        self.terms[name] = fields | self.fields(m.Register, rest)
        pid = opened.pop("pid", 0)
        for rank in range(-1, fields["ranks"]):
            who = name if rank < 0 else f"{name}.{rank}"
            self.open(who, **opened, pid=pid + rank if pid and rank >= 0 else 0)
            (reply,) = self.say(who, m.Register(**self.terms_of(who)), hide=m.Registered)
        if isinstance(reply, m.Registered):
            self.known("n", reply.namespace)

    def fields(self, kind: Any, words: Iterable[str]) -> dict[str, Any]:
        info: Any = inspect.type_info(kind)
        types = {field.name: field.type for field in info.fields}
        pairs = [word.partition("=") for word in words]
        return {name: typed(types[name], text) for name, _, text in pairs}

    def do_ready(self, *words: str) -> None:
        """Engines, once the tiers have told their epochs."""
        self.do_engine(*words)
        self.rig.answer_all()
        self.rig.seen.clear()
        self.out.clear()

    def open(self, who: str, **fields: Any) -> None:
        self.knock(who, **fields)
        self.say(who, m.Hello(clock_s=self.rig.now))

    def knock(self, who: str, uid: int = 0, own: bool = False, pid: int = 0, **more: Any) -> None:
        self.rig._connections += 1
        self.connections[who] = self.rig._connections
        self.step(Opened(self.connections[who], uid, bool(own), pid=pid, start=pid, **more), who)

    def do_session(self, *words: str) -> None:
        """Connections that only look; ``own``: of the daemon's user; ``silent``: no Hello."""
        fields: dict[str, Any] = {name: True for name in ("own", "silent") if name in words}
        given = [word.partition("=") for word in words if "=" in word]
        fields |= {name: int(text) if name == "uid" else text for name, _, text in given}
        for who in words:
            if "=" not in who and who not in fields:
                self.knock(who, **{n: v for n, v in fields.items() if n != "silent"})
                if "silent" not in fields:
                    self.say(who, m.Hello(clock_s=self.rig.now))

    def do_back(self, who: str, *words: str) -> None:
        """A rank or a scheduler connects again, and registers."""
        self.open(who)
        self.say(who, self.build(m.Register, words, **self.terms_of(who)))

    def do_lost(self, *words: str) -> None:
        """EOF of connections; ``exiting``: their processes are exiting."""
        for word in words:
            for who in self.who(word):
                connection = self.connections[who]
                self.asked = {k: v for k, v in self.asked.items() if k[0] != connection}
                self.step(Lost(connection, exiting=words[-1] == "exiting"), who)

    def do_ended(self, *words: str) -> None:
        """Processes of lost connections have ended."""
        for who in words:
            self.step(ProcessEnded(self.connections[who]))

    def do_garbled(self, who: str) -> None:
        """What is no message."""
        self.step(Faulted(self.connections[who], "bad_frame", "too long"), who)

    def do_populated(self, pages: str) -> None:
        self.step(PopulatedTo(int(pages) * PAGE))

    def do_quotas(self, *words: str) -> None:
        self.step(QuotasAre(tuple(map(quota, words))))

    def do_limits(self) -> None:
        """All quotas, as ``quotas`` sets them."""
        self.out += sorted(map(str, self.rig.machine.quotas))

    def do_stop(self) -> None:
        self.step(Stopping())

    def do_tick(self) -> None:
        self.step(Tick())

    def do_clock(self, text: str) -> None:
        """Time passes before anybody looks."""
        self.rig.now += float(text[1:-1])

    def do_finish(self) -> None:
        """The steps that are due at once."""
        steps = self.rig.finish()
        self.tell()
        self.out.append(f"{steps} steps" if steps != 1 else "1 step")

    # ------------------------------------------------------------ tiers

    def do_forget(self) -> None:
        """L1 loses what it holds."""
        self.rig.forget_l1()

    def do_tiers(self, how: str) -> None:
        """Whether operations fail, ``down``, or not, ``up``."""
        self.rig.down = how == "down"

    def do_answer(self, *words: str) -> None:
        """Operations end, until none is open: of a kind, of a tier; or the first one, ``first``, or
        with ``yes`` or ``no`` for each of its records."""
        tier = next((int(w[1:]) for w in words if re.fullmatch(r"t\d+", w)), None)
        kinds = [f"Tier{w.capitalize()}" for w in words if w.isalpha() and w not in _ANSWERS]
        which = [w == "yes" for w in words if w in ("yes", "no")]
        while todo := [
            op
            for op in self.rig.asked
            if (not kinds or type(op).__name__ in kinds) and tier in (None, op.tier)
        ]:
            self.rig.answer(todo["last" in words and -1], *which)
            self.tell()
            if which or "first" in words or "last" in words:
                break

    def do_tier(self, name: str, what: str, *words: str) -> None:
        """``has``: its chunks; ``loses`` some or all; ``reports``; ``snapshot``,
        ``back``: its store goes back to it; ``forgets`` its epochs."""
        number = int(name[1:])
        shelf = self.rig.shelves[number]
        if what == "has":
            every = sorted((one[2], one[3].rstrip(b"\0").decode()) for one in shelf)
            for group in sorted({group for group, _ in every}) or [0]:
                chunks = ranges(chunk for of, chunk in every if of == group) or "none"
                self.out.append(f"{chunks} of group {group}" if group else chunks)
        elif what == "loses":
            gone = {*map(key, spelled(words))}
            kept = {one for one in shelf if words and one[3][:WIDTH] not in gone}
            self.rig.shelves[number] = kept
        elif what == "snapshot":
            self.snapshots = [set(shelf), dict(self.rig.notes[number])]
        elif what == "back":
            self.rig.shelves[number], self.rig.notes[number] = self.snapshots
        elif what == "forgets":
            self.rig.notes[number].clear()
        elif what == "reports":
            fields = {k: v == "yes" for k, _, v in (word.partition("=") for word in words)}
            self.step(TierReport(number, fields))
        else:
            raise ValueError(what)

    def do_use(self, *words: str) -> None:
        """The list of tiers; ``renewed=0``: the store of that one may be another."""
        numbers = tuple(int(word[1:]) for word in words if word[0] == "t")
        renewed = tuple(int(word.partition("=t")[2]) for word in words if "=" in word)
        while len(self.rig.shelves) <= max(numbers, default=0):
            self.rig.shelves.append(set())
            self.rig.notes.append({})
        self.step(TiersAre(numbers, tuple(f"tier{n}" for n in numbers), renewed))

    def do_next_daemon(self, *words: str) -> None:
        """Another daemon with the same tiers; nobody is connected to it."""
        before = self.rig
        self.change(words)
        self.made["core"]["boot"] = b"another boot %3d" % len(self.numbers)
        self.rig = Seen(**self.made)
        self.rig.shelves, self.rig.notes, self.rig.now = before.shelves, before.notes, before.now
        self.connections, self.asked = {}, {}

    def say_tiered(self, who: str, words: list[str]) -> None:
        """Store; then L1 has nothing any more, and the tiers do."""
        self.say_store(who, words)
        self.rig.answer_all()
        self.rig.forget_l1()
        self.rig.seen.clear()
        self.out.clear()

    # ------------------------------------------------------------ questions

    def do_due(self) -> None:
        """When the next step is due."""
        due = self.rig.machine.next_deadline()
        wait = None if due is None else round(due - self.rig.now, 6)
        self.out.append("never" if wait is None else "now" if wait == 0 else f"in {wait:g}s")

    def do_owes(self, who: str) -> None:
        """Whether a rank may still read or write the arena."""
        self.out.append("yes" if self.rig.machine.owes(self.connections[who]) else "no")

    def do_busy(self) -> None:
        """Whether the daemon would wait before it ends, and what tiers still lack."""
        machine = self.rig.machine
        said = ["flushing" if machine.flushing else "busy" if machine.busy else "no"]
        self.out.append(", ".join(said + [f"{n}: {rows} rows" for n, rows in machine.unflushed()]))

    def do_pages(self, *words: str) -> None:
        """The pages of the slots of leases and grants, by group and rank."""
        for word in words:
            for slots in self.slots[word]:
                shards = len(slots.extents[0]) if slots.extents else 0
                text = " | ".join(
                    ranges(str(at // PAGE) for at in slots.offsets(shard, PAGE).tolist())
                    for shard in range(shards)
                )
                self.out.append(text)

    def do_show(self, place: str, *fields: str) -> None:
        """A field of the status, by its path, or fields there. What is 0 in a table is left out."""
        value: Any = self.rig.status
        for part in place.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        shows = {field: value[field] for field in fields} or {place.rpartition(".")[2]: value}
        self.out.append(", ".join(f"{name} {shown(one)}" for name, one in shows.items()))

    def do_explain(self, *words: str) -> None:
        """Fields of the last lookup, as ``kvass explain`` has it."""
        if "asker" not in self.connections:
            self.open("asker")
        (reply,) = self.say("asker", m.Explain(), hide=m.Explained)
        entry = reply.lookups[-1]
        self.out.append(", ".join(f"{word} {shown(entry[word])}" for word in words))
