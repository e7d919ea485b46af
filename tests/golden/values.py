"""One value of every message, with every field of protocol 1 set to something telling.

Law of this file: what is frozen never changes. A message that gains a field keeps its value here
and gets a second one (``"matched.coverage"``, say) that sets the new field. ``freeze`` then adds
what ``protocol-1.json`` lacks, and touches nothing that is in it::

    python -m tests.golden.values
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, Final

import msgspec

from kvass import messages as m
from kvass.errors import ErrorCode
from kvass.kinds import GroupKind
from kvass.types import GroupLayout, Limits, Quota, RankLayout, Slots, Timing
from kvass.wire import framing

FROZEN: Final = Path(__file__).parent / "protocol-1.json"
BOOT: Final = bytes(range(16))
_DIGESTS: Final = bytes(range(64))
_SLOTS: Final = Slots(
    extents=((0, 1 << 30), (4096, 5 << 30)),
    set_=b"\x00\x00\x01\x00",
    slot=b"\x00\x00\x00\x00\x02\x01\x00\x00",
)
_LAYOUT: Final = RankLayout(
    groups=(
        GroupLayout(
            kind="full", block_tokens=16, layers=("model.layers.0", "b"), page_bytes=(65536, 512)
        ),
        GroupLayout(
            kind="sliding_window",
            block_tokens=32,
            layers=("c",),
            page_bytes=(1 << 33,),
            window_tokens=4096,
        ),
        GroupLayout(kind="state", block_tokens=256, layers=("d",), page_bytes=(1,)),
    )
)

VALUES: Final[dict[str, m.FromClient | m.FromDaemon]] = {
    "hello": m.Hello(
        seq=1,
        protocol_min=2,
        protocol_max=3,
        features=("a", "b"),
        client="kvass 0.1",
        clock_s=12345.5,
        wants_arena=True,
    ),
    "welcome": m.Welcome(
        seq=1,
        protocol=2,
        features=("a",),
        boot=BOOT,
        version="0.1",
        clock_s=12345.75,
        arena_bytes=1 << 40,
        populated_bytes=1 << 20,
        limits=Limits(
            frame_bytes=1 << 20,
            keys_per_message=1000,
            leases_per_instance=100,
            reservations_per_instance=200,
            sessions=10,
            namespaces=20,
            instance_write_share=0.125,
            request_id_bytes=64,
            identity_bytes=4096,
        ),
        timing=Timing(lease_s=1.5, reserve_s=2.5, lost_engine_grace_s=0.5, lookup_budget_ms=12.5),
    ),
    "register": m.Register(
        seq=2,
        instance="engine-0",
        identity={"model": "m", "kv_dtype": "bfloat16"},
        chunk_tokens=256,
        rank=3,
        ranks=8,
        world_size=4,
        shard=1,
        writer=False,
        layout=_LAYOUT,
    ),
    "register.generation": m.Register(
        seq=2,
        instance="engine-0",
        identity={"model": "m"},
        chunk_tokens=256,
        generation=b"sixteen bytes ..",
    ),
    "register.counted": m.Register(
        seq=2, instance="engine-0", identity={"model": "m"}, chunk_tokens=256, counted=False
    ),
    "register.cache_bytes": m.Register(
        seq=2, instance="engine-0", identity={"model": "m"}, chunk_tokens=256, cache_bytes=1 << 40
    ),
    "register.uncached": m.Register(
        seq=2, instance="engine-0", identity={"model": "m"}, chunk_tokens=256, uncached="it was off"
    ),
    "registered": m.Registered(seq=2, namespace=bytes(32), missing=(1, 127)),
    "lookup": m.Lookup(seq=3, request="r-1", digests=_DIGESTS, width=16, first=2, readers=(0, 7)),
    "lookup.spare": m.Lookup(seq=3, request="r-1", digests=_DIGESTS, width=16, spare=1),
    "welcome.tiers": m.Welcome(seq=1, boot=BOOT, arena_bytes=1 << 30, tiers=2),
    "lookup.tiers": m.Lookup(
        seq=3, request="r-1", digests=_DIGESTS, width=16, budget_ms=250.5, prefill_tokens_s=40000.0
    ),
    "lookup.blocks": m.Lookup(
        seq=3, request="r-1", digests=_DIGESTS, width=16, blocks=bytes(32), again=True
    ),
    "lookup.first_blocks": m.Lookup(
        seq=3, request="r-1", digests=_DIGESTS, width=16, first_blocks=bytes(32)
    ),
    "lookup.writing": m.Lookup(seq=3, request="r-1", digests=_DIGESTS, width=16, writing=True),
    "lookup.reported": m.Lookup(seq=3, request="r-1", digests=_DIGESTS, width=16, reported=True),
    "prefetch": m.Prefetch(
        seq=3, request="r-1", digests=_DIGESTS, width=16, namespace=bytes(32), budget_ms=1000.0
    ),
    "prefetch.ahead": m.Prefetch(
        seq=3, request="r-1", digests=_DIGESTS, width=16, first=2, tenant="team-a"
    ),
    "prefetch.session": m.Prefetch(
        seq=3, request="r-1", digests=_DIGESTS, width=16, session=4_000_000_000
    ),
    "promoting": m.Promoting(seq=3),
    "prefetched": m.Prefetched(seq=3, chunks=4),
    "matched.spare": m.Matched(
        seq=3, boot=BOOT, lease=1, chunks=3, deadline_s=12406.25, slots=(_SLOTS,), spare=1
    ),
    "matched.blocks": m.Matched(
        seq=3, boot=BOOT, lease=1, first=2, chunks=2, deadline_s=12406.25, slots=(_SLOTS,), blocks=5
    ),
    "matched": m.Matched(
        seq=3,
        boot=BOOT,
        lease=1 << 40,
        first=2,
        chunks=4,
        given_s=12346.25,
        deadline_s=12406.25,
        slots=(_SLOTS, Slots()),
    ),
    "matched.tiers": m.Matched(
        seq=3, boot=BOOT, lease=1, chunks=3, deadline_s=12406.25, slots=(_SLOTS,), tiers=(0, 256)
    ),
    "release": m.Release(boot=BOOT, lease=300, rank=5),
    "index_chunks": m.IndexChunks(
        seq=3,
        space=b"salt",
        digests=_DIGESTS,
        tokens=bytes(range(32)),
        width=16,
        start=512,
        predecessor=bytes(16),
    ),
    "indexed": m.Indexed(seq=3, chunks=4),
    "find_segments": m.FindSegments(
        seq=3, space=b"salt", tokens=bytes(range(32)), width=16, first=1, min_tokens=256
    ),
    "segments": m.Segments(
        seq=3,
        segments=(m.Segment(new_start=7, old_start=512, length=256, predecessor=bytes(16)),),
        digests=bytes(range(16)),
    ),
    "reserve": m.Reserve(
        seq=5,
        items=[
            m.ReserveItem(request="r-1", digests=_DIGESTS, first=1, groups=5),
            m.ReserveItem(request="r-2", digests=b""),
        ],
        width=8,
    ),
    "reserve.blocks": m.Reserve(
        seq=5,
        items=[m.ReserveItem(request="r-1", digests=_DIGESTS, first=4, blocks=bytes(48))],
        width=16,
    ),
    "granted": m.Granted(
        seq=5,
        boot=BOOT,
        given_s=12347.5,
        deadline_s=12407.5,
        grants=[m.Grant(reservation=301, chunks=(1, 300), slots=(_SLOTS,)), m.Grant()],
    ),
    "granted.which": m.Granted(
        seq=5,
        boot=BOOT,
        given_s=12347.5,
        deadline_s=12407.5,
        grants=[
            m.Grant(
                reservation=301,
                chunks=(1, 2, 300),
                slots=(_SLOTS, Slots(), _SLOTS),
                which=((1, 300), (), (1, 2)),
            )
        ],
    ),
    "granted.refused": m.Granted(
        seq=5,
        boot=BOOT,
        given_s=12347.5,
        deadline_s=12407.5,
        grants=[m.Grant(later=512, refused=(3, 300)), m.Grant(refused=())],
    ),
    "present": m.Present(seq=5, digests=_DIGESTS, width=16, tiers=True),
    "present.groups": m.Present(seq=5, digests=_DIGESTS, groups=2),
    "presence": m.Presence(seq=5, held=b"\x01\x00\x01\x01"),
    "commit": m.Commit(boot=BOOT, reservation=301, rank=2),
    "abort": m.Abort(boot=BOOT, reservation=301, rank=2),
    "handed_over": m.HandedOver(boot=BOOT, leases=(300, 302), reservations=(301,)),
    "handed_over.results": m.HandedOver(
        boot=BOOT,
        results=(
            m.LookupResult("r-1", 592, 0, failed=True, tenant="t", why="load_failed_here"),
            m.LookupResult("r-2", 592, 576, why="absent", tiers=(256, 0)),
        ),
        prefill_tokens_s=9000.5,
    ),
    "handed_over.answers": m.HandedOver(
        boot=BOOT, results=(m.LookupResult("r-3", 592, answer_tokens=300, repeated_tokens=256),)
    ),
    "shadow_report": m.ShadowReport(
        boot=BOOT,
        sampled=0.25,
        lookups=3,
        lookup_tokens=1 << 40,
        hit_tokens=1 << 39,
        saved_s=1.5,
        loads=2,
        load_bytes=1 << 30,
        load_s=0.125,
        not_compared=1,
        groups=(
            m.ShadowGroup(
                rows=5, bytes=1 << 29, differing_rows=1, largest_difference=0.5, at_value=2.0
            ),
        ),
    ),
    "ping": m.Ping(seq=6),
    "pong": m.Pong(seq=6),
    "clear": m.Clear(seq=7, namespace=bytes(32), everything=True),
    "clear.tiers": m.Clear(seq=7, everything=True, tiers=True),
    "lookup.tenant": m.Lookup(seq=3, request="r-1", digests=b"", tenant="team-a"),
    "reserve.tenant": m.Reserve(
        seq=5, items=[m.ReserveItem(request="r-1", digests=b"", tenant="team-a")]
    ),
    "clear_tenant": m.ClearTenant(seq=12, tenant="team-a"),
    "lookup.session": m.Lookup(seq=3, request="r-1", digests=b"", session=(1 << 32) - 1),
    "lookup.keep": m.Lookup(seq=3, request="r-1", digests=b"", keep_s=300.0),
    "matched.kept": m.Matched(seq=3, first=1, chunks=1, kept=1),
    "reserve.keep": m.Reserve(
        seq=5, items=[m.ReserveItem(request="r-1", digests=b"", keep_s=86_400.0)]
    ),
    "granted.kept": m.Granted(seq=5, grants=[m.Grant(kept=4)]),
    "granted.error": m.Granted(seq=5, grants=[m.Grant(error="request: too long")]),
    "reserve.session": m.Reserve(
        seq=5, items=[m.ReserveItem(request="r-1", digests=b"", session=(1 << 32) - 1)]
    ),
    "end_session": m.EndSession(seq=13, session=(1 << 32) - 1, tenant="team-a"),
    "session_ended": m.SessionEnded(seq=13, rows=65536),
    "lookup.then": m.Lookup(seq=3, request="r-1", digests=b"", then_s=300.0),
    "reserve.then": m.Reserve(
        seq=5, items=[m.ReserveItem(request="r-1", digests=b"", then_s=300.0)]
    ),
    "ask_session": m.AskSession(seq=14, session=(1 << 32) - 1, tenant="team-a", fetch=True),
    "ask_session.keys": m.AskSession(seq=14, session=7, keys=True),
    "session_is.keys": m.SessionIs(
        seq=14,
        chunks=2,
        namespace=bytes(range(32)),
        digests=_DIGESTS,
        engine=m.EngineIs(
            model="m",
            identity={"model": "m"},
            chunk_tokens=256,
            world_size=1,
            shards=(0, 0),
            writers=(0,),
            which=(0, 0),
            layouts=(b"\x81",),
        ),
    ),
    "session_is": m.SessionIs(
        seq=14,
        model="m",
        chunk_tokens=256,
        chunks=4,
        hit_chunks=1,
        l1_bytes=65536,
        loading_bytes=65536,
        tier_bytes={"disk:/var/cache/kvass": 131072},
        fetching=1,
    ),
    "empty_tier": m.EmptyTier(seq=11, tier="disk:/var/cache/kvass"),
    "set_quota": m.SetQuota(seq=10, quota=Quota("team-a", 1 << 33, 1 << 30), remove=True),
    "quota_set": m.QuotaSet(seq=10),
    "cleared": m.Cleared(seq=7, rows=65536),
    "removals": m.Removals(seq=10, since=1 << 40, width=16, present=(_DIGESTS, b"")),
    "removed": m.Removed(
        seq=10, upto=1 << 41, lost=True, removed=(b"", _DIGESTS), present=(b"\0\1", b"")
    ),
    "shadow_report.wrong_rows": m.ShadowReport(
        boot=BOOT, groups=(m.ShadowGroup(rows=5, differing_rows=3, wrong_rows=2),)
    ),
    "status": m.Status(seq=8),
    "status.terms_of": m.Status(seq=8, terms_of=(bytes(range(32)),)),
    "status_reply": m.StatusReply(seq=8, fields={"rows": 1, "share": 0.5, "groups": [{"a": "b"}]}),
    "lookup.explain": m.Lookup(
        seq=3,
        request="r-1",
        digests=b"",
        prompt_tokens=1000,
        local_tokens=32,
        if_absent="other_salt",
        absent_chunk=1,
    ),
    "matched.explain": m.Matched(seq=3, boot=BOOT, why="evicted"),
    "matched.whole": m.Matched(seq=3, boot=BOOT, why="no_window_here", whole=5),
    "lookup_notes": m.LookupNotes(
        boot=BOOT,
        notes=(
            m.LookupNote(
                request="r-1",
                why="no_daemon",
                when_s=12345.5,
                prompt_tokens=1000,
                local_tokens=32,
                detail="d",
            ),
        ),
    ),
    "drained": m.Drained(boot=BOOT),
    "explain": m.Explain(seq=12, engine="e", request="r-1", limit=5),
    "explained": m.Explained(seq=12, lookups=({"request": "r-1", "age_s": 0.5},)),
    "populated": m.Populated(bytes=1 << 30),
    "error": m.Error(seq=9, code="bad_value", text="readers: no", fatal=True),
}

STRUCTS: Final[dict[str, type[msgspec.Struct]]] = {
    **{str(type(v).__struct_config__.tag): type(v) for v in VALUES.values()},
    **{
        kind.__name__: kind
        for kind in (
            *(m.ReserveItem, m.Grant, m.Segment, m.LookupNote, m.LookupResult),
            *(m.ShadowGroup, m.EngineIs),
            *(GroupLayout, Quota, RankLayout, Slots),
        )
    },
}
"""Whose missing fields mean their defaults. ``Limits`` and ``Timing`` are always sent whole."""

WORDS: Final = {"codes": typing.get_args(ErrorCode), "kinds": typing.get_args(GroupKind)}


def defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What each optional field of ``kind`` means where it is missing, JSON-able."""
    found = {
        f.name: f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory()
        for f in msgspec.structs.fields(kind)
        if not f.required
    }
    told = {k: v for k, v in found.items() if k not in ("limits", "timing")}
    plain: dict[str, Any] = json.loads(msgspec.json.encode(told))
    return plain


def shortest(frame: bytes) -> bytes:
    """``frame`` with the shortest header of its map: a struct of more than 15 fields always gets a
    longer one."""
    fields = msgspec.msgpack.decode(frame[framing.HEADER.size :])
    raw = msgspec.msgpack.encode(fields)
    return framing.HEADER.pack(len(raw)) + raw


def freeze() -> None:
    """Add what is new to ``FROZEN``; what is there stays as it is."""
    frozen: dict[str, Any] = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    frames = {name: shortest(framing.encode(value)).hex() for name, value in VALUES.items()}
    missing = {name: defaults(kind) for name, kind in STRUCTS.items()}
    old = frozen.get("missing", {})
    text = json.dumps(
        {
            "frames": {**frames, **frozen.get("frames", {})},
            "missing": {name: {**new, **old.get(name, {})} for name, new in missing.items()},
            "words": {
                k: sorted({*new, *frozen.get("words", {}).get(k, ())}) for k, new in WORDS.items()
            },
        },
        indent=1,
    )
    FROZEN.write_text(text + "\n")


if __name__ == "__main__":
    freeze()
