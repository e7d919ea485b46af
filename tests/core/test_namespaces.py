"""What stays of namespaces that were removed."""

from __future__ import annotations

import pytest

from kvass.core.clients.traffic import Traffic
from kvass.core.rows import namespaces
from kvass.core.rows.namespaces import Namespaces
from kvass.core.rows.row_classes import Namespace
from kvass.messages import Register
from tests.core.rig import Rig


def test_what_a_forgotten_namespace_counted_stays_under_its_model_for_so_many_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "_MODELS", 2)
    rig = Rig(namespaces=1)
    for model in "abcca":
        e = rig.engine(model, identity={"model": model})
        e.holds("x")
        e.quit()
    rig.engine("last", identity={"model": "last"})
    counted = {f["model"]: f["lookups"] for f in rig.status["forgotten"]}
    assert counted == {"a": 2, "b": 1, "other": 2}


def test_an_id_is_never_another_digests_and_comes_back_with_its_own() -> None:
    known = Namespaces(most=2)
    for digest in (b"a", b"b", b"c"):
        made = Namespace(known.new_id(digest)[0], digest, [], 256, Register("e", {}, 256))
        made.traffic = Traffic(lookups=1)
        known.add(made)
        assert known.by_digest[digest] is known[made.id] is made
    for epoch, digest in enumerate((b"a", b"b", b"c")):
        known.remove(known.by_digest[digest], epoch)
    assert (dict(known), known.by_digest) == ({}, {})
    assert known.forgotten[""].lookups == 3
    assert known.new_id(b"d") == (3, 0), "the oldest is forgotten"
    assert [known.new_id(digest) for digest in (b"b", b"c", b"a")] == [(1, 1), (2, 2), (4, 0)]
