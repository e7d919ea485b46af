"""The rule of outcomes, which all our own tiers have in common. The rest of it: their suites."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvass.errors import ItemRefused, ItemUnreadable, TierDown
from kvass.tiers import proof, refusals
from kvass.tiers.record_tier import Outcome, RecordTier
from tests.tiers.records import KEYS, fill, hits, keys_of


class Outcomes(RecordTier):
    """Keeps no bytes but those of notes. ``trouble``: what these keys meet. ``reading``,
    ``writing``: what notes meet. ``lost``: sets of notes do nothing."""

    def __init__(self) -> None:
        super().__init__("outcomes")
        self.held: list[bytes] = []
        self.trouble: dict[bytes, Outcome] = {}
        self.notes: dict[str, bytes] = {}
        self.reading: TierDown | None = None
        self.writing: TierDown | None = None
        self.lost = False
        self.reads = 0

    def _exists(self, keys: Sequence[bytes]) -> list[Outcome]:
        return [self.trouble.get(key, key in self.held) for key in keys]

    def _put(self, keys: Sequence[bytes], data: object, tenant: str) -> list[Outcome]:
        self.held += keys
        return self._exists(keys)

    def _delete(self, keys: Sequence[bytes]) -> list[Outcome]:
        self.held = [key for key in self.held if key not in keys]
        return [self.trouble.get(key, True) for key in keys]

    def _get(self, keys: Sequence[bytes], into: object) -> list[Outcome]:
        return self._exists(keys)

    def _clear(self) -> None: ...

    def _get_note(self, name: str) -> bytes | None:
        self.reads += 1
        if self.reading is not None:
            raise self.reading
        return self.notes.get(name)

    def _put_note(self, name: str, value: bytes) -> None:
        if self.writing is not None:
            raise self.writing
        if not self.lost:
            self.notes[name] = value

    def _close(self) -> None: ...


def test_trouble_with_some_is_a_miss_and_with_all_is_the_tiers() -> None:
    tier = Outcomes()
    tier.trouble = {KEYS[0]: TierDown("first"), KEYS[1]: TierDown("second")}
    assert fill(tier, KEYS[:3]) == tier.load(KEYS[:3], [[]] * 3) == [False, False, True]
    for ask in (fill, hits):
        with pytest.raises(TierDown, match="first"):
            ask(tier, KEYS[:2])
    assert tier.probe(KEYS[:3]) == [False, False, True]
    tier.delete(KEYS[:3])
    with pytest.raises(TierDown, match="second"):
        tier.delete(KEYS[1:2])
    with pytest.raises(TierDown, match="first"):
        tier.probe([KEYS[5], KEYS[0]])  # absence is no success
    assert tier.probe(KEYS[2:3]) == [False]


def test_a_key_is_put_once() -> None:
    tier = Outcomes()
    assert fill(tier, [*KEYS, *KEYS]) == [True] * 20
    assert tier.held == KEYS


# ---------------------------------------------------------------- refusals


class Later:
    """A time at which nothing is remembered."""

    monotonic = staticmethod(lambda: float("inf"))


def loads(tier: Outcomes, keys: list[bytes]) -> list[bool]:
    return tier.load(keys, [[]] * len(keys))


def test_a_refusal_of_all_is_theirs_until_a_check_of_the_backend_fails() -> None:
    tier = Outcomes()
    assert all(fill(tier, KEYS))
    tier.trouble = dict.fromkeys(KEYS, ItemRefused("outcomes: not these"))
    assert fill(tier, KEYS) == loads(tier, KEYS) == tier.probe(KEYS) == [False] * 10
    assert tier.report() == {"refused_records": 30, "refusals": {"not these": 30}}
    tier.reading = TierDown("no answer")
    for ask in (fill, loads):
        with pytest.raises(TierDown, match="no answer"):
            ask(tier, KEYS)
    tier.trouble[KEYS[0]] = True
    assert sum(loads(tier, KEYS)) == 1, "then no check is needed"
    tier.trouble[KEYS[1]] = TierDown("the cable is out")
    tier.trouble[KEYS[0]] = False
    with pytest.raises(TierDown, match="the cable is out"):
        loads(tier, KEYS)


def test_a_backend_that_takes_no_writes_is_down_for_stores_alone() -> None:
    tier = Outcomes()
    tier.trouble = dict.fromkeys(KEYS, ItemRefused("no"))
    tier.writing = ItemRefused("read-only")
    assert loads(tier, KEYS) == [False] * 10
    with pytest.raises(TierDown, match="read-only") as caught:
        fill(tier, KEYS)
    assert type(caught.value) is TierDown
    assert not tier.check_store(), "nothing was written"
    tier.writing = TierDown("no answer")
    for wrong in ({}, {proof.NAME: b"a page"}):
        tier.notes = wrong
        with pytest.raises(TierDown, match="no answer"):
            tier.check_store()
    tier.notes = {proof.NAME: proof._made()}
    assert not tier.check_store()  # it answers, and what it has is right


def test_a_note_that_cannot_be_set_says_nothing_of_reading() -> None:
    """An epoch that nobody has noted yet is one namespace's; probes of others go on."""
    tier = Outcomes()
    tier.check_store()
    for tier.writing in (ItemRefused("full"), TierDown("full")):
        with pytest.raises(ItemRefused, match="full"):
            tier.set_note("epoch", b"7")
    tier.reading = TierDown("no answer")
    with pytest.raises(TierDown, match="no answer") as caught:
        tier.set_note("epoch", b"7")
    assert type(caught.value) is TierDown


def test_what_cannot_be_read_is_absent_until_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Outcomes()
    assert all(fill(tier, KEYS))
    tier.trouble = {KEYS[2]: ItemUnreadable("archived"), KEYS[3]: ItemRefused("try later")}
    assert loads(tier, KEYS) == [True] * 2 + [False] * 2 + [True] * 6
    tier.trouble = {}
    assert tier.probe(KEYS) == [True] * 2 + [False] + [True] * 7
    assert tier.probe([KEYS[2], KEYS[2]]) == [False, False]
    assert all(fill(tier, KEYS[2:3]))
    assert all(tier.probe(KEYS))

    tier.trouble = {KEYS[2]: ItemUnreadable("archived")}
    assert sum(loads(tier, KEYS)) == 9
    tier.trouble = {}
    assert tier.probe(KEYS).count(False) == 1
    monkeypatch.setattr(refusals, "time", Later)
    assert all(tier.probe(KEYS)), "somebody else may have stored it meanwhile"


def test_a_failure_of_all_says_nothing_of_a_record() -> None:
    """With the wrong password every record is refused."""
    tier = Outcomes()
    assert all(fill(tier, KEYS))
    tier.trouble = dict.fromkeys(KEYS, ItemUnreadable("forbidden"))
    tier.reading = ItemUnreadable("forbidden")
    tier.writing = ItemRefused("forbidden")
    with pytest.raises(TierDown, match="forbidden"):
        loads(tier, KEYS)
    tier.trouble, tier.reading, tier.writing = {}, None, None
    assert all(tier.probe(KEYS))
    assert tier.report()["refused_records"] == 0


def test_reasons_and_records_that_are_remembered_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "_MOST_KEYS", 30)
    tier = Outcomes()
    many = keys_of(100)
    assert all(fill(tier, many))
    for _ in range(2):
        tier.trouble = {key: ItemUnreadable(f"{key!r}\n" * 50) for key in many}
        loads(tier, many)
    report = tier.report()
    assert report["refused_records"] == sum(report["refusals"].values()) == 200
    assert len(report["refusals"]) == len(caplog.records) == 17
    assert all(len(reason) <= 160 and reason.isprintable() for reason in report["refusals"])
    tier.trouble = {}
    assert tier.probe(many) == [True] * 70 + [False] * 30


# ---------------------------------------------------------------- proofs


def test_a_proof_is_what_was_written_now() -> None:
    tier = Outcomes()
    assert tier.check_store()
    first = tier.notes[proof.NAME]
    assert not tier.check_store(whole=False)
    assert tier.notes[proof.NAME] == first, "one small read"
    assert tier.check_store()
    assert tier.notes[proof.NAME] != first
    for wrong in (b"", b"<html>", first[:-1], first[1:], first + b"0", first.upper(), first * 99):
        tier.notes[proof.NAME] = wrong
        tier.lost = True
        for whole in (True, False):
            with pytest.raises(TierDown, match="not read back"):
                tier.check_store(whole)
        tier.lost = False
        tier.check_store(whole=False)  # a damaged note is written anew
    tier.lost = True
    tier.check_store(whole=False)
    with pytest.raises(TierDown, match="not read back"):
        tier.check_store()


@pytest.mark.parametrize("before", [None, proof._made()], ids=["none", "old"])
def test_an_answer_of_a_replica_may_be_late(before: bytes | None) -> None:
    """As behind a proxy that reads from replicas. The first look is before the write."""
    late, written = iter([before, before]), list[bytes]()

    def put(name: str, value: bytes) -> None:
        written.append(value)

    proof.Proof("late", lambda _: next(late, b"".join(written)), put).prove("write", since=0.0)
    assert len(written) == 1
    assert list(late) == [], "it was read again"


def test_what_a_stranger_says_of_a_note_or_a_clear_is_not_believed() -> None:
    tier = Outcomes()
    tier.set_note("epoch", b"7")
    tier.notes[proof.NAME] = b"<html>  <h1>Log in"
    tier.lost = True
    asks: list[Callable[[], object]] = [
        tier.clear,
        lambda: tier.note("epoch"),
        lambda: tier.note("none"),
    ]
    for ask in asks:
        with pytest.raises(TierDown, match="<html> <h1>Log in"):
            ask()
    with pytest.raises(TierDown, match="is it the store"):
        tier.set_note("epoch", b"8")


def test_calls_that_wait_for_a_proof_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Outcomes()
    tier.check_store()
    reads = tier.reads
    tier._proof.prove("read", since=0.0)
    assert tier.reads == reads + 1, "of another depth"
    tier._proof.prove("read", since=0.0)
    tier._proof.prove("try", since=0.0)
    assert tier.reads == reads + 1
    tier.reading = TierDown("no answer")
    for _ in range(2):
        with pytest.raises(TierDown, match="no answer"):
            tier._proof.prove("write", since=0.0)
    assert tier.reads == reads + 2
