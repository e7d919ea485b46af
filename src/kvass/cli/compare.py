"""The command ``kvass compare``: shows in which fields namespaces differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvass.cli import daemon
from kvass.errors import Incompatible, UnknownName
from kvass.types import printable

Terms = Mapping[str, str]
"""All fields of a namespace."""
CHARS: Final = 8
"""How many characters of a namespace are printed, as in ``kvass status``."""
LAYOUT: Final = "the layout of the KV cache: which rank has which layers"
MOST: Final = 16
"""How many namespaces are compared, the first one included."""
_ABOUT: Final = """Show in which fields the namespaces of engines differ. Engines share KV if all
fields are equal. Without names, compare those of the connected engines. With one name, show all
fields."""


def run(argv: list[str]) -> int:
    """Print the differences. Raises ``Unavailable``, ``Incompatible``, and ``UnknownName`` if a
    name is not that of one namespace."""
    parser = daemon.parser_of("compare", _ABOUT)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="the beginning of a namespace or of an engine's id, as `kvass status` shows them",
    )
    own, named = daemon.parse(parser, argv)
    names: list[str] = own.names
    with daemon.client(named) as client:
        fields = client.status()
        chosen = [namespace_of(fields, name) for name in names]
        every = list(dict.fromkeys(chosen or _connected(fields)))
        chosen = every[:MOST]
        shown = client.status(terms_of=chosen)["namespaces"] if chosen else []
    terms = {ns["namespace"]: ns["terms"] for ns in shown if "terms" in ns}
    if len(terms) < len(chosen):
        raise Incompatible("the daemon is older than this command: restart it")
    if len(names) == 1:
        text: Iterator[str] = (f"{name}: {value}" for name, value in terms[chosen[0]].items())
    elif len(chosen) < 2:
        text = iter([f"all are in namespace {one[:CHARS]}: they share KV" for one in chosen])
    else:
        text = (line for other in chosen[1:] for line in lines(chosen[0], other, terms))
    print("\n".join(map(printable, text)) or "no engine is connected")
    if left_out := len(every) - len(chosen):
        print(f"and {left_out:,} more")
    return 0


def _connected(fields: Mapping[str, Any]) -> list[str]:
    return [engine["namespace"] for engine in fields["engines"] if engine["namespace"]]


def namespace_of(fields: Mapping[str, Any], name: str) -> str:
    """The digest of the namespace of the engine whose id is ``name``, else of the one namespace
    whose digest, or an engine's id, begins with ``name``. Raises ``UnknownName``."""
    for engine in fields["engines"]:
        if engine["instance"] == name and engine["namespace"]:
            return str(engine["namespace"])
    known = [ns["namespace"] for ns in fields["namespaces"]]
    found = {each for each in known if each.startswith(name)}
    engines = [engine for engine in fields["engines"] if engine["instance"].startswith(name)]
    found.update(engine["namespace"] for engine in engines if engine["namespace"])
    if len(found) == 1:
        return str(found.pop())
    what = "several namespaces" if found else "no namespace"
    there = ", ".join(each[:CHARS] for each in known) or "none"
    raise UnknownName(f"{name[:80]!r} names {what}; there are: {there}")


def lines(one: str, other: str, terms: Mapping[str, Terms]) -> Iterator[str]:
    """The lines to print of two namespaces. ``terms``: by digest."""
    differ = differing(terms[one], terms[other])
    equal = len({*terms[one], *terms[other]}) - len(differ)
    yield f"{one[:CHARS]} and {other[:CHARS]} share no KV. Equal fields: {equal}. Others:"
    for name in differ:
        yield f"  {name}"
        yield from (f"    {ns[:CHARS]}  {terms[ns].get(name, '(absent)')}" for ns in (one, other))
    if not differ:
        yield f"  {LAYOUT}"


def differing(one: Terms, other: Terms) -> list[str]:
    """The names of the fields in which two namespaces differ. If there are none, ``LAYOUT``
    does."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]
