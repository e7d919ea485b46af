"""A registration costs what its own rank's layout costs, however many ranks there are, and nobody
keeps the layout: the garbage collector would look at all of its names."""

from __future__ import annotations

from typing import Any

import pytest

from kvass import messages as m
from kvass.core.clients import registry
from kvass.core.handlers import admission
from kvass.errors import FrameError
from kvass.types import GroupLayout, Limits, RankLayout
from kvass.wire import framing
from tests.core.rig import Rig

RANKS = 16
GROUPS = 5


def layout(layers: int = 3, groups: int = GROUPS) -> RankLayout:
    names = tuple(map(str, range(layers)))
    return RankLayout((GroupLayout("full", 16, names, (1,) * layers),) * groups)


def terms(rank: int, **fields: Any) -> m.Register:
    return m.Register(
        **{
            "seq": 2,
            "instance": "e",
            "identity": {"model": "m"},
            "chunk_tokens": 16,
            "rank": rank,
            "ranks": RANKS,
            "world_size": RANKS,
            "shard": rank,
            "layout": layout(),
            **fields,
        }
    )


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=1024)


def test_each_rank_is_computed_once_and_none_with_the_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = {"shards": 0, "digests": 0}
    shard_bytes, digest = GroupLayout.shard_bytes, registry.layout_digest

    def counted_bytes(group: GroupLayout, chunk_tokens: int) -> int:
        computed["shards"] += 1
        return shard_bytes(group, chunk_tokens)

    def counted_digest(layout: RankLayout | None) -> bytes:
        computed["digests"] += 1
        return digest(layout)

    monkeypatch.setattr(GroupLayout, "shard_bytes", counted_bytes)
    monkeypatch.setattr(admission, "layout_digest", counted_digest)
    for rank in range(RANKS):
        computed |= {"shards": 0, "digests": 0}
        reply = rig.ask(rig.open(), terms(rank))
        assert computed == {"shards": GROUPS, "digests": 1}
    assert reply.namespace


def test_nobody_keeps_a_layout_and_all_ranks_have_one_identity(rig: Rig) -> None:
    connections = [rig.open() for _ in range(RANKS)]
    for rank, connection in enumerate(connections):
        rig.ask(connection, terms(rank))
    known = [rig.machine.registered(connection) for connection in connections]
    assert {one.layout for one in known if one} == {None}
    assert len({id(one.identity) for one in known if one}) == 1
    workers = rig.machine.state.instances["e"].workers.values()
    assert {group.layers for worker in workers for group in worker.groups} == {()}
    again = rig.ask(connections[3], terms(3))
    assert isinstance(again, m.Registered)
    assert rig.code(connections[3], terms(3, layout=layout(4))) == "already_registered"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layout": layout(1000)}, "layout: 5000 layers, there may be 4096 in all groups"),
        ({"identity": {str(i): "" for i in range(513)}}, "identity: at most 512 fields"),
    ],
)
def test_what_no_engine_sends_is_refused(rig: Rig, wrong: dict[str, Any], says: str) -> None:
    connection = rig.open()
    reply = rig.ask(connection, terms(0, **wrong))
    assert (reply.code, reply.text) == ("limit", says)
    most = {"layout": layout(4096, 1), "identity": {str(i): "" for i in range(512)}}
    assert isinstance(rig.ask(connection, terms(0, **most)), m.Registered)


def test_a_register_too_large_to_be_decoded_in_a_step_is_refused_undecoded() -> None:
    most = Limits().register_bytes
    (said,) = framing.from_clients().feed(framing.encode(terms(0, identity={"": "x" * 60_000})))
    assert isinstance(said, m.Register)
    large = terms(0, layout=RankLayout((GroupLayout("full", 16, ("x" * 60_000,) * 11, (1,) * 11),)))
    assert len(framing.encode(large)) > most
    with pytest.raises(FrameError, match=r"register of \d+ bytes: send at most 655360"):
        [*framing.from_clients().feed(framing.encode(large))]
    other = m.Lookup(request="r", digests=bytes(most + 1))
    assert [*framing.from_clients().feed(framing.encode(other))] == [other]
