"""The context of a request is in the messages, flat, and comes out of them as it went in."""

from __future__ import annotations

import msgspec
import pytest

from kvass.messages import NO_CONTEXT, Lookup, RequestContext, Reserve, ReserveItem, context_of
from kvass.wire import framing

WHOLE = RequestContext(
    budget_ms=1.5,
    prefill_tokens_s=2.5,
    tenant="team-a",
    prompt_tokens=3,
    local_tokens=4,
    if_absent="other_salt",
    absent_chunk=5,
    session=6,
    keep_s=7.5,
    reported=True,
    then_s=8.5,
)


def test_every_field_is_told() -> None:
    told = msgspec.structs.asdict(WHOLE)
    assert all(told[name] != value for name, value in msgspec.structs.asdict(NO_CONTEXT).items())


@pytest.mark.parametrize("context", [WHOLE, NO_CONTEXT])
def test_messages_carry_the_context(context: RequestContext) -> None:
    lookup = Lookup("r", b"12345678", 8, **msgspec.structs.asdict(context))
    reserve = Reserve(
        items=[ReserveItem("r", b"12345678", **msgspec.structs.asdict(context))], width=8
    )
    frames = framing.encode(lookup) + framing.encode(reserve)
    first, second = framing.from_clients().feed(frames)
    assert isinstance(first, Lookup)
    assert isinstance(second, Reserve)
    assert context_of(first) == context_of(second.items[0]) == context
    assert type(context_of(first)) is RequestContext


def test_an_item_tells_only_what_is_no_default() -> None:
    context = msgspec.structs.asdict(RequestContext(session=1))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(ReserveItem("r", b"12345678", **context)))
    assert told == {"request": "r", "digests": b"12345678", "session": 1}


def test_a_context_does_not_change() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(WHOLE, "tenant", "team-b")  # noqa: B010
