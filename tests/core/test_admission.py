"""Registration (laws 2 and 10): ranks are named, and a namespace covers all that changes bytes."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.types import GroupLayout, RankLayout
from tests.core.rig import Rig, layout


def group(**fields: Any) -> RankLayout:
    good = {"kind": "full", "block_tokens": 16, "layers": ("a",), "page_bytes": (4096,)}
    return RankLayout(groups=(GroupLayout(**{**good, **fields}),))


@pytest.mark.parametrize(
    "other",
    [
        {"identity": {"model": "n"}},
        {"identity": {"model": "m", "tag": ""}},
        {"identity": {}},
        {"chunk_tokens": 32},
        {"layout": layout(2)},
        {"layout": layout(1, 1)},
        {"layout": group(layers=("b",))},
        {"layout": group(block_tokens=8)},
        {"layout": group(layers=("a", "b"), page_bytes=(2048, 2048))},
        {"ranks": 2},
    ],
)
def test_whatever_changes_bytes_makes_another_namespace(rig: Rig, other: dict[str, Any]) -> None:
    assert rig.engine("one").namespace != rig.engine("two", **other).namespace


def test_a_models_name_for_people_separates_nothing(rig: Rig) -> None:
    """Nor does it contradict: older engines have it among the fields, and give no other."""
    one = rig.engine("one", model="/a/model", identity={"weights": "w"})
    two = rig.engine("two", model="/b/copy", identity={"weights": "w"})
    old = rig.engine("old", identity={"weights": "w", "model": "/c/old"})
    assert one.namespace == two.namespace != old.namespace
    assert (
        rig.register(rig.open(), "one", model="/d", identity={"weights": "w"}).code == "rank_taken"
    )
    shown = [space["model"] for space in rig.machine.status()["namespaces"]]
    assert shown == ["/a/model", "/c/old"]


def test_a_long_name_is_shown_in_part(rig: Rig) -> None:
    """512 engines of the longest names would make a status that no client takes."""
    rig.engine("one", model="m" * 4096, identity={"weights": "w"})
    rig.engine("two", identity={"model": "i" * 60_000})
    status = rig.machine.status()
    names = [one["model"] for one in (*status["namespaces"], *status["engines"])]
    assert [len(name) for name in names] == [256] * 4


def test_a_namespace_of_many_groups_takes_the_places_of_several() -> None:
    """A status names each group in one step."""
    rig = Rig(pages=1024, namespaces=32)
    engines = [
        rig.engine(name, identity={"model": name}, layout=layout(*[1] * 20)) for name in "abc"
    ]
    for e in (engines[1], engines[0], engines[2]):
        e.store("chunk")
    connection = rig.open()
    wide: dict[str, Any] = {"rank": 0, "identity": {"model": "w"}, "layout": layout(*[1] * 40)}
    for e in engines[:2]:
        assert rig.register(connection, "w", **wide).code == "limit"
        e.quit()
    engines[2].quit()
    assert rig.register(connection, "w", **wide).namespace
    assert [ns["model"] for ns in rig.status["namespaces"]] == ["c", "w"]


@pytest.mark.parametrize("wrong", [{"layers": ()}, {"page_bytes": (1, 2)}, {"page_bytes": (0,)}])
def test_a_layer_without_a_size_is_refused(rig: Rig, wrong: dict[str, Any]) -> None:
    reply = rig.register(rig.open(), rank=0, layout=group(**wrong))
    assert reply.code == "bad_value"
    assert "one positive page_bytes per layer" in reply.text
