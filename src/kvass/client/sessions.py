"""What can be done with a client's session, by command and over HTTP: one table for both.

Law of this file: nothing that is done with a session changes what a lookup may find.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from kvass.client.client import Client
from kvass.types import Size

_NOT_SHOWN: Final = ("seq", "namespace", "digests", "engine")
_UNKNOWN: Final = "the daemon knows no prompt of it"


class SessionOperation(NamedTuple):
    """``about``: one line. ``do``: has the daemon do it with a session of a tenant, by names, and
    returns JSON-able fields. ``say``: a line of them for people."""

    about: str
    do: Callable[[Client, str, str], dict[str, Any]]
    say: Callable[[dict[str, Any]], str]


def _show(client: Client, session: str, tenant: str) -> dict[str, Any]:
    reply = msgspec.structs.asdict(client.ask_session(session, tenant))
    return {name: value for name, value in reply.items() if name not in _NOT_SHOWN}


def _fetch(client: Client, session: str, tenant: str) -> dict[str, Any]:
    reply = client.ask_session(session, tenant, fetch=True)
    return {name: getattr(reply, name) for name in ("model", "chunks", "hit_chunks", "fetching")}


def _release(client: Client, session: str, tenant: str) -> dict[str, Any]:
    return {"rows": client.end_session(session, tenant)}


def _places(fields: dict[str, Any]) -> str:
    if not fields["chunks"]:
        return _UNKNOWN
    of, tokens = fields["chunk_tokens"], fields["chunks"] * fields["chunk_tokens"]
    places = [f"{Size(fields['l1_bytes']).rounded()} in L1"]
    if fields["loading_bytes"]:
        places.append(f"{Size(fields['loading_bytes']).rounded()} of the others are being loaded")
    tiers = fields["tier_bytes"].items()
    places += [f"{Size(size).rounded()} in {name}" for name, size in tiers if size]
    ready = f"{fields['hit_chunks'] * of} of {tokens} tokens of its last prompt are in L1"
    return f"{fields['model'] or '?'}: {ready} ({', '.join(places)})"


def _begun(fields: dict[str, Any]) -> str:
    if not fields["chunks"]:
        return _UNKNOWN
    if fields["hit_chunks"] == fields["chunks"]:
        return "all of its last prompt is in L1"
    if not fields["fetching"]:
        return "nothing is loaded now: there is no tier, or no room yet"
    return (
        f"{fields['chunks'] - fields['hit_chunks']} chunks are fetched, as far as tiers have them"
    )


OPERATIONS: Final = {
    "show": SessionOperation("say where its rows are", _show, _places),
    "fetch": SessionOperation(
        "load its rows from tiers into L1, after all that wait", _fetch, _begun
    ),
    "release": SessionOperation(
        "say that it ended: its rows are evicted first",
        _release,
        lambda fields: f"{fields['rows']} rows are evicted first",
    ),
}
