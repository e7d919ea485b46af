"""The bytes of protocol 1, frozen: an older or newer peer sends and understands exactly these."""

from __future__ import annotations

import json
import typing
from typing import Any, Final

import msgspec
import pytest

from kvass import messages as m
from kvass.errors import FrameError
from kvass.kinds import GroupKind
from kvass.types import GroupLayout, Limits, Slots, Timing
from kvass.wire import framing
from tests.golden.values import FROZEN, STRUCTS, VALUES, WORDS, defaults

FROZEN_NOW: Final[dict[str, Any]] = json.loads(FROZEN.read_text())
FRAMES: Final = {name: bytes.fromhex(text) for name, text in FROZEN_NOW["frames"].items()}
KINDS: Final[dict[str, type[m.AnyMessage]]] = {
    kind.__struct_config__.tag: kind
    for union in (m.FromClient, m.FromDaemon)
    for kind in typing.get_args(union)
}


def decode(frame: bytes) -> m.FromClient | m.FromDaemon:
    for decoder in (framing.from_clients(), framing.from_daemon()):
        try:
            (message,) = decoder.feed(frame)
        except FrameError:
            continue
        return message
    raise AssertionError("no message of either direction")


def payload(frame: bytes) -> Any:
    return msgspec.msgpack.decode(frame[framing.HEADER.size :])


def as_before(frame: bytes, before: bytes) -> bytes:
    """``frame`` without what ``Limits`` and ``Timing``, always sent whole, have gained."""
    now, then = payload(frame), payload(before)
    for part in ("limits", "timing"):
        if part in then:
            now[part] = {k: v for k, v in now[part].items() if k in then[part]}
    raw = msgspec.msgpack.encode(now)
    return framing.HEADER.pack(len(raw)) + raw


@pytest.mark.parametrize("name", FRAMES)
def test_todays_encoder_still_says_it_so(name: str) -> None:
    assert as_before(framing.encode(VALUES[name]), FRAMES[name]) == FRAMES[name]


@pytest.mark.parametrize("name", FRAMES)
def test_todays_decoder_still_reads_it_so(name: str) -> None:
    assert decode(FRAMES[name]) == VALUES[name]


def test_every_message_is_frozen() -> None:
    """If this is red: add a value to ``values.py`` and run it."""
    assert KINDS.keys() == {payload(frame)["t"] for frame in FRAMES.values()}
    assert FRAMES.keys() == VALUES.keys()


def test_every_struct_inside_a_message_is_frozen() -> None:
    inside: set[type] = set()

    def visit(kind: msgspec.inspect.Type) -> None:
        if isinstance(kind, msgspec.inspect.StructType) and kind.cls not in inside:
            inside.add(kind.cls)
            for field in kind.fields:
                visit(field.type)
        for part in ("item_type", "key_type", "value_type"):
            if isinstance(inner := getattr(kind, part, None), msgspec.inspect.Type):
                visit(inner)
        for part in ("types", "item_types"):
            for inner in getattr(kind, part, ()):
                visit(inner)

    for kind in KINDS.values():
        visit(msgspec.inspect.type_info(kind))
    assert inside == {*STRUCTS.values(), Limits, Timing}
    assert STRUCTS.keys() == FROZEN_NOW["missing"].keys()


@pytest.mark.parametrize("name", STRUCTS)
def test_a_new_field_has_a_default_and_an_old_default_stays(name: str) -> None:
    """A peer of the previous version does not send the field; what that means never changes."""
    frozen, now = FROZEN_NOW["missing"][name], defaults(STRUCTS[name])
    assert {k: now.get(k, "(gone or required now)") for k in frozen} == frozen


def test_structs_say_only_what_is_no_default() -> None:
    """So a field that is added leaves the bytes of older values as they are; ``Limits`` and
    ``Timing`` are policy, which the daemon must say even where it is our default."""
    assert all(kind.__struct_config__.omit_defaults for kind in STRUCTS.values())
    assert not Limits.__struct_config__.omit_defaults
    assert not Timing.__struct_config__.omit_defaults


def test_no_word_was_lost() -> None:
    for name, words in FROZEN_NOW["words"].items():
        assert set(words) <= set(WORDS[name])


@pytest.mark.parametrize(
    ("kind", "window", "first", "blocks", "shard_bytes"),
    [
        ("full", 0, 0, 16, 196608),
        ("sliding_window", 100, 669, 7, 86016),
        ("sliding_window", 300, 469, 16, 196608),
        ("chunked_local", 512, 512, 16, 196608),
        ("chunked_local", 128, 768, 0, 4096),
        ("state", 0, 767, 1, 12288),
    ],
)
def test_where_a_shard_lies_never_changes(
    kind: GroupKind, window: int, first: int, blocks: int, shard_bytes: int
) -> None:
    """No message says how long a shard is or which rows a hit needs: each end computes it, and two
    versions that disagreed would read and write each other's slots."""
    one = GroupLayout(kind, 16, ("a", "b", "c"), (4096, 4000, 4001), window)
    assert one.needs(768) == first
    assert (one.row_blocks(256), one.shard_bytes(256)) == (blocks, shard_bytes)
    slots = Slots(((0, 1 << 20), (1 << 21, 1 << 22)), b"\0\0\1\0", b"\2\0\0\0\1\0\0\0")
    at = [(1 << 20) + 2 * shard_bytes, (1 << 22) + shard_bytes]
    assert slots.offsets(1, shard_bytes).tolist() == at


def test_a_frame_is_a_little_endian_length_and_a_map() -> None:
    said = b"\x0d\x00\x00\x00" + b"\x82" + b"\xa1t\xa4ping" + b"\xa3seq\x06"
    assert FRAMES["ping"] == said
    long = framing.encode(m.Lookup(request="r", digests=bytes(70_000)))
    assert int.from_bytes(long[:4], "little") == len(long) - 4 > 1 << 16


@pytest.mark.parametrize(
    ("fields", "harm"),
    [
        ([("rank", int, 0), ("required", int)], True),
        ([("rank", str, "")], True),
        ([("renamed", int, 0)], True),
        ([("rank", int, 1)], True),
        ([("rank", int, 0), ("added", tuple, ())], False),
    ],
)
def test_negative_control_each_harmful_change_is_seen(fields: list[Any], harm: bool) -> None:
    fields = [("boot", bytes), ("reservation", int), *fields]
    kind = msgspec.defstruct("Commit", fields, bases=(m.Message,), tag="commit", kw_only=True)
    raw, missing = FRAMES["commit"][framing.HEADER.size :], FROZEN_NOW["missing"]["commit"]
    try:
        same = msgspec.msgpack.encode(msgspec.msgpack.decode(raw, type=kind)) == raw
    except msgspec.ValidationError:
        same = False
    assert harm != (same and missing.items() <= defaults(kind).items())
