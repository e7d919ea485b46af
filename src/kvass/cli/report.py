"""Prints a daemon's status: whether it runs, what it saves, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any, Final

from kvass.cli.kinds import token_kinds
from kvass.client.health import notes, tier_note, tier_state, troubles, used_tiers
from kvass.types import printable

WIDTH: Final = 79
CUT: Final = 12
"""What is left of a name, at least."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS: Final = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


def report(fields: dict[str, Any]) -> Iterator[str]:
    """The lines to print, of at most ``WIDTH`` characters, from the fields of ``kvass status
    --json``."""
    return map(printable, _report(fields))


def _report(fields: dict[str, Any]) -> Iterator[str]:
    problems = troubles(fields)
    state = "DEGRADED" if problems else "OK"
    up = span(fields.get("up_s", 0))
    yield f"kvass {fields['version']}  up {up}  pid {fields.get('pid', '?')}  {state}"
    for line in problems:
        yield from wrap(f"! {line}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    for line in notes(fields):
        yield from wrap(f"- {line}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    capacity, used = fields["l1_capacity_bytes"], fields["l1_used_bytes"]
    evicted = sum(n for name, n in fields["counters"].items() if name.startswith("evicted_"))
    there = fields["l1_populated_bytes"]
    populating = f", {percent(there, capacity)} populated" if there < capacity else ""
    yield (
        f"memory   {size(used)} of {size(capacity)} used ({percent(used, capacity)}), "
        f"{fields['rows']:,} rows, {evicted:,} evicted{populating}"
    )
    if len(nodes := fields.get("l1_node_bytes", {})) > 1:
        yield f"on nodes {', '.join(f'{node}: {size(n)}' for node, n in nodes.items())}"
    yield from _arena(fields.get("arena", {}))
    namespaces = fields["namespaces"]
    counted = [*namespaces, *fields.get("forgotten", [])]
    input_tokens, hit_tokens, recent_tokens, recent_hit_tokens = (
        sum(ns.get(name, 0) for ns in counted)
        for name in ("lookup_tokens", "hit_tokens", "minute_lookup_tokens", "minute_hit_tokens")
    )
    yield (
        f"hit rate {percent(hit_tokens, input_tokens)} of {input_tokens:,} tokens since start, "
        f"{percent(recent_hit_tokens, recent_tokens)} of {recent_tokens:,} in the last minute"
    )
    yield f"saved    {hit_tokens:,} tokens since start; {_saved(counted)}"
    if failed := sum(ns.get("failed_loads", 0) for ns in counted):
        loads = sum(ns.get("loads", 0) for ns in counted)
        recent = sum(ns.get("minute_failed_loads", 0) for ns in counted)
        yield (
            f"loads    {failed:,} of {loads:,} failed since start, {recent:,} in the last minute; "
            "their tokens are misses"
        )
    yield from _engines(fields.get("engines", []))
    yield from _shadows(namespaces, fields.get("forgotten", []))
    yield from _models(namespaces)
    yield from _tenants(fields.get("tenants", []))
    yield from _tiers(fields["tiers"])


def _saved(counted: list[dict[str, Any]]) -> str:
    """The prefill that was saved, as far as the engines' speed is known."""
    known = [s for ns in counted if (s := ns.get("saved_prefill_s", 0)) is not None]
    if not any(known) and len(known) < len(counted):
        return "how long prefill takes is not known yet"
    return f"{span(sum(known))} of prefill"


def _arena(arena: dict[str, Any]) -> Iterator[str]:
    if arena.get("place"):
        cold = arena["started_empty"]
        found = f"adopted {arena['adopted_rows']:,} rows, {size(arena['adopted_bytes'])}"
        text = f"arena    {arena['place']}: {f'started empty: {cold}' if cold else found}"
        if rests := arena.get("resting_bytes"):
            text += f"; {size(rests)} rest {_until(arena)}"
        yield from wrap(text, WIDTH, subsequent_indent=" " * 9)


def _until(arena: dict[str, Any]) -> str:
    """Until when rows rest that an engine may still read or write since the last daemon's end."""
    if arena["resting_s"] is not None:
        return f"for {span(arena['resting_s'])} more"
    pids = ", ".join(map(str, arena["resting_pids"][:8]))
    return f"until the engines' processes {pids} have ended or said that they are done"


def _engines(engines: list[dict[str, Any]]) -> Iterator[str]:
    if not engines:
        yield "engines  none connected"
        yield '  An engine that is not listed says in its own log why: "kvass is off".'
        return
    names = [engine["instance"].partition(", ranks ") for engine in engines]
    rows = [
        (
            name,
            engine["model"],
            f"{engine['ranks'] - len(engine['missing_ranks'])}/{engine['ranks']}",
            ", ".join(map(str, engine["uids"])),
            ", ".join(map(str, engine.get("pids", [])[:2])),
            "shadow"
            if engine.get("shadow")
            else percent(engine.get("hit_tokens", 0), engine.get("lookup_tokens", 0)),
            f"{span(engine['seen_s'])} ago" if "seen_s" in engine else "?",
        )
        for engine, (name, _, _) in zip(engines, names, strict=True)
    ]
    yield from _table(("engine", "model", "ranks", "uid", "pid", "hit rate", "seen"), rows)
    for name, _, where in names:
        if where:
            yield f"  {name[:CUT]}: ranks {where}"
    if not any(engine.get("lookup_tokens", 1) for engine in engines):
        yield "  No lookup yet: prompts shorter than a block are neither looked up nor stored."


def _shadows(namespaces: list[dict[str, Any]], forgotten: list[dict[str, Any]]) -> Iterator[str]:
    """What kvass would save: what engines in shadow mode found, also those that have ended."""
    for ns in (*namespaces, *forgotten):
        if (shadow := ns.get("shadow")) is None:
            continue
        where = ns["namespace"][:8] if "namespace" in ns else "removed namespaces"
        hit, asked = shadow["hit_tokens"], shadow["lookup_tokens"]
        differences = ", ".join(
            f"{group['kind'] or group['group']} {group['largest_difference']:.3g}"
            + (f" at a value of {group['at_value']:.3g}" if group["largest_difference"] else "")
            + (f" (wrong rows: {group['wrong_rows']:,})" if group["wrong_rows"] else "")
            for group in shadow["groups"]
        )
        yield from wrap(
            f"shadow   {ns['model'] or '?'} ({where}): would hit {hit:,} of {asked:,} tokens "
            f"({percent(hit, asked)}) and save {_shadow_saved(shadow)} of prefill; "
            f"{shadow['loads']:,} loads of {size(shadow['load_bytes'])} took "
            f"{shadow['load_s']:.2f} s; largest difference: {differences or 'nothing compared'}; "
            f"{shadow['not_compared']:,} hits not compared",
            WIDTH,
            subsequent_indent="         ",
        )


def _shadow_saved(shadow: dict[str, Any]) -> str:
    return "a time not known yet" if shadow["saved_s"] is None else span(shadow["saved_s"])


def _models(namespaces: list[dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            ns["model"] or "?",
            ns["namespace"][:8],
            f"{sum(group['rows'] for group in ns['groups']):,}",
            size(sum(group["used_bytes"] for group in ns["groups"])),
            size(sum(group["row_bytes"] for group in ns["groups"]) / ns.get("chunk_tokens", 1)),
            percent(ns.get("hit_tokens", 0), ns.get("lookup_tokens", 0)),
            percent(ns.get("minute_hit_tokens", 0), ns.get("minute_lookup_tokens", 0)),
        )
        for ns in namespaces
    ]
    yield from _table(
        ("model", "namespace", "rows", "used", "per token", "hit rate", "minute"), rows
    )
    for ns in namespaces:
        if len(kinds := token_kinds(ns)) > 1:
            yield f"  {ns['namespace'][:8]} per token: {', '.join(kinds)}"[:WIDTH]
        if answers := ns.get("answer_tokens", 0):
            share = percent(ns["repeated_tokens"], answers)
            text = f"later prompts repeat {share} of {answers:,} tokens of answers"
            yield f"  {ns['namespace'][:8]}: {text}"
        if fields := ns.get("differs_in"):
            text = f"{ns['namespace'][:8]} shares nothing with {ns['like'][:8]} of the same model; "
            yield from wrap(
                text + f"they differ in {'; '.join(fields)}", WIDTH, initial_indent="  "
            )


def _tenants(tenants: list[dict[str, Any]]) -> Iterator[str]:
    """The table of tenants that use memory, have sent lookups or have a quota. It is left out if
    it would have one tenant only, and no tenant has a quota."""
    rows = [
        (
            t["tenant"],
            size(t["l1_bytes"]),
            "-" if t["cap_bytes"] is None else size(t["cap_bytes"]),
            size(t["reserved_bytes"]),
            percent(t["hit_tokens"], t["lookup_tokens"]),
            percent(t["minute_hit_tokens"], t["minute_lookup_tokens"]),
        )
        for t in tenants
        if t["quota"] or t["lookups"] or t["l1_bytes"]
    ]
    if len(rows) > 1 or any(t["quota"] for t in tenants):
        yield from _table(("tenant", "memory", "cap", "reserved", "hit rate", "last minute"), rows)


def _tiers(tiers: list[dict[str, Any]]) -> Iterator[str]:
    rows = []
    tiers = used_tiers(tiers)
    for tier in tiers:
        speed = tier["load_bytes_s"]
        holds = size(tier["bytes"]) if "bytes" in tier else "?"
        if tier.get("capacity_bytes"):
            holds += f" of {size(tier['capacity_bytes'])}"
        queue = f"{tier['flush_queue_rows']:,}"
        state = ", ".join(filter(None, (tier_state(tier), tier_note(tier))))
        rows.append((tier["tier"], state, holds, queue, f"{size(speed)}/s" if speed else "-"))
    yield from _table(("tier", "state", "holds", "queue", "speed"), rows)
    for tier in tiers:
        tenants = [
            (
                name,
                size(has["bytes"]),
                size(has["cap_bytes"]) if "cap_bytes" in has else "-",
                size(has["reserved_bytes"]),
            )
            for name, has in tier.get("tenants", {}).items()
        ]
        yield from _table((f"tenant in {tier['tier']}", "holds", "cap", "reserved"), tenants)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table. If they would be too long, the first column is cut at its end, and then
    the second one."""
    if not rows:
        return
    yield ""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for at in range(2):
        others = sum(widths) - widths[at] + 2 * (len(heads) - 1)
        widths[at] = min(widths[at], max(CUT, WIDTH - others))
    for row in (heads, *rows):
        cells = [text[:width].ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()[:WIDTH]


def size(count: float) -> str:
    """A number of bytes as text, like ``1.5 GiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit else f"{int(count)} B"


def percent(part: float, whole: float) -> str:
    """A ratio as text, like ``71.2 %``; a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def span(seconds: float) -> str:
    """A time as text in its two largest units, like ``3h12m``."""
    left, parts = int(seconds), list[str]()
    for name, unit in _SPANS:
        count, left = divmod(left, unit)
        if count or parts or unit == 1:
            parts.append(f"{count}{name}")
    return "".join(parts[:2])
