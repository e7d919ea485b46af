"""Prints the results of a sweep: as a table, as values for JSON, and as an HTML page with plots."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import floor, log2, log10
from textwrap import wrap
from typing import Any, Final

from kvass.simulate.player import Outcome, Setting
from kvass.simulate.traces import Trace
from kvass.types import Size

DAY_S: Final = 86_400.0
KNEE: Final = 0.9
"""The recommended size has this share of the hits of a cache that evicts nothing."""
_SLICES: Final = 60
_WIDTH, _HEIGHT, _MARGIN = 720, 300, 48
_COLOURS: Final = ("#1f6fb4", "#d1581c", "#2c8c4a", "#8a4fb0", "#b02a4c", "#6b6b6b")


@dataclass(frozen=True)
class Result:
    """The result of one setting with one trace. ``optimal``: the best hit rate that an eviction
    policy can have in a cache of the size of L1 and L2 together. ``infinite``: the hit rate of a
    cache of unlimited size."""

    trace: Trace
    outcome: Outcome
    optimal: float
    infinite: float
    geometry: str = ""
    """Whose KV cache the sizes are for, in words."""

    def fields(self) -> dict[str, Any]:
        """The values that ``--json`` prints. Rates are 0 to 1."""
        o, s = self.outcome, self.outcome.setting
        return {
            "trace": self.trace.name,
            "geometry": self.geometry,
            "requests": len(self.trace.asking),
            **asdict(s),
            "input_tokens": o.input_tokens,
            "hit_tokens": o.hit_tokens,
            "hit_rate": o.hit_rate,
            "from_l2_tokens": o.from_l2_tokens,
            "waited_for_l2_s": o.waited_s,
            "loads_not_worth_it": o.not_worth_it,
            "l2_stored_bytes": o.l2_stored_bytes,
            "l2_stored_bytes_a_day": self.l2_bytes_a_day,
            "stored_rows": o.stored_rows,
            "stored_tokens": o.stored_tokens,
            "stored_tail_tokens": o.tail_tokens,
            "stored_bytes": o.stored_bytes,
            "stored_window_bytes": o.window_bytes,
            "evicted_rows": o.evicted_rows,
            "optimal_hit_rate": self.optimal,
            "infinite_hit_rate": self.infinite,
            "saved_prefill_s": o.hit_tokens / s.prefill_tokens_s if s.prefill_tokens_s else None,
            "saved_s": self.saved_s if s.prefill_tokens_s else None,
        }

    @property
    def l2_bytes_a_day(self) -> float | None:
        """The bytes that the tier would be written each day, if every hour were like this trace.
        None if the trace takes no time."""
        seconds = self.trace.seconds
        return self.outcome.l2_stored_bytes / seconds * DAY_S if seconds > 0 else None

    @property
    def saved_s(self) -> float:
        """The seconds that computing the hit tokens would take, minus those that requests waited
        for the tier."""
        o = self.outcome
        return o.hit_tokens / max(1.0, o.setting.prefill_tokens_s) - o.waited_s


def _dimensions(s: Setting) -> dict[str, str]:
    """The swept options except L1, by name, as text. Those of a tier only if there is a tier."""
    yes = ("no", "yes")
    of_tier = {
        "L2/s": f"{s.l2_bytes_s / 1e9:g}GB",
        "flush": s.flush,
        "keep-loaded": yes[s.keep_loaded],
        "skip-slow-loads": yes[s.skip_slow_loads],
    }
    return {
        "chunk": f"{s.chunk_tokens}",
        "tails": yes[s.tails],
        "windows": {None: "default", 0: "dense"}.get(s.windows, f"{s.windows}"),
        "ends": f"{s.ends:.0%}{f', {s.wrong_ends:.0%} wrong' * (s.wrong_ends > 0)}",
        "L2": Size(s.l2_bytes).rounded() if s.l2_bytes else "none",
        **(of_tier if s.l2_bytes else {}),
    }


def _varying(results: Sequence[Result]) -> list[str]:
    """The names of swept options that differ between the results."""
    all_of = [_dimensions(r.outcome.setting) for r in results]
    return [name for name in all_of[0] if len({each[name] for each in all_of}) > 1]


def _name(setting: Setting, names: Sequence[str]) -> str:
    """The text of the swept options ``names`` of a setting."""
    return ", ".join(f"{name} {_dimensions(setting)[name]}" for name in names)


def table(results: Sequence[Result]) -> Iterator[str]:
    """The lines of the report. They have at most 79 characters, unless many options are swept."""
    for trace, of_trace in _by_trace(results):
        unit = f"{trace.input_tokens:,} tokens in, {trace.unique_tokens:,} of them different"
        yield f"{trace.name}: {len(trace.asking):,} requests, {unit}"
        if trace.wrong:
            yield f"  {trace.wrong} lines were skipped, the first: {trace.why[0]}"
        yield from wrap(of_trace[0].geometry, 79)
        first, varying = of_trace[0].outcome.setting, _varying(of_trace)
        same = [name for name in _dimensions(first) if name not in varying]
        yield from wrap(_name(first, same), 79)
        columns = [_columns(result, varying) for result in of_trace]
        lines = [[*columns[0]], *([*line.values()] for line in columns)]
        widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
        for texts in lines:
            yield "  ".join(t.rjust(width) for t, width in zip(texts, widths, strict=True))
        yield f"a cache that evicts nothing: {max(r.infinite for r in of_trace):.2%}"
        yield advice(of_trace)
        yield from _wear(of_trace)


def _columns(result: Result, varying: Sequence[str]) -> dict[str, str]:
    """The cells of a result's line, by the name of the column. Columns of a tier, or of the prefill
    speed, exist only if there is one."""
    o, s = result.outcome, result.outcome.setting
    columns = {"L1": Size(s.l1_bytes).rounded()}
    columns |= {name: _dimensions(s)[name] for name in varying}
    columns["hit rate"] = f"{o.hit_rate:.2%}"
    if s.l2_bytes:
        columns["of L2"] = f"{o.from_l2_tokens / max(1, o.input_tokens):.1%}"
    columns["optimal"] = f"{result.optimal:.2%}"
    if s.l2_bytes:
        columns["waited"] = f"{o.waited_s:,.0f} s"
    if s.prefill_tokens_s:
        columns["saved"] = f"{result.saved_s:,.0f} s"
    columns["evicted"] = f"{o.evicted_rows:,}"
    if o.window_bytes:
        columns["a token"] = Size(o.stored_bytes // max(1, o.stored_tokens)).rounded()
    if s.l2_bytes:
        columns["to L2"] = Size(o.l2_stored_bytes).rounded()
    if s.tails or "tails" in varying:
        columns["in tails"] = f"{o.tail_tokens / max(1, o.stored_tokens):.1%}"
    return columns


def knee(results: Sequence[Result]) -> Result | None:
    """The smallest size with ``KNEE`` of all possible hits. None if no size has so many."""
    wanted = KNEE * results[0].infinite
    enough = [r for r in results if r.outcome.hit_rate >= wanted > 0]
    return min(enough, key=_price, default=None)


def advice(results: Sequence[Result]) -> str:
    """One sentence that says which size to buy."""
    infinite = results[0].infinite
    if not infinite:
        return "no prompt repeats the beginning of another: a cache finds nothing here"
    least = knee(results)
    if least is None:
        most = max(results, key=lambda r: r.outcome.hit_rate).outcome
        return (
            f"none of these sizes has {KNEE:.0%} of the hits that are possible; the best, "
            f"{most.hit_rate / infinite:.0%}, is L1 of {Size(most.setting.l1_bytes).rounded()}"
        )
    s = least.outcome.setting
    l2 = f" and L2 of {Size(s.l2_bytes).rounded()}" if s.l2_bytes else ""
    how = "".join(f", {_name(s, [name])}" for name in _varying(results) if name != "L2")
    share = least.outcome.hit_rate / infinite
    return (
        f"L1 of {Size(s.l1_bytes).rounded()}{l2}{how} has {share:.0%} of the hits that are possible"
    )


def _wear(results: Sequence[Result]) -> Iterator[str]:
    """What is written to L2 each day, in one line; none without L2."""
    of_l2 = [r.l2_bytes_a_day for r in results if r.outcome.setting.l2_bytes]
    if days := [day for day in of_l2 if day is not None]:
        least, most = (Size(day).rounded() for day in (min(days), max(days)))
        yield f"written to L2 a day: {least if least == most else f'{least} to {most}'}"


def _price(result: Result) -> tuple[int, int, float]:
    """A sort key: by size, and of equal sizes the one with most hits is first."""
    s = result.outcome.setting
    return s.l1_bytes, s.l2_bytes, -result.outcome.hit_rate


def _by_trace(results: Sequence[Result]) -> Iterator[tuple[Trace, list[Result]]]:
    for name in dict.fromkeys(id(r.trace) for r in results):
        of_trace = [r for r in results if id(r.trace) == name]
        yield of_trace[0].trace, of_trace


# ---------------------------------------------------------------- HTML

Line = tuple[str, list[tuple[float, float]]]
"""A curve: its name in the legend, and its points."""


def head(title: str) -> str:
    """The beginning of an HTML page that loads no other files."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:760px;margin:2em auto;"
        "padding:0 1em}pre{overflow-x:auto}svg{width:100%;height:auto}"
        "svg text{font:12px system-ui,sans-serif;fill:currentColor}"
        f"@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}}}</style>"
        f"<h1>{title}</h1>"
    )


def page(results: Sequence[Result]) -> str:
    """An HTML page that loads no other files."""
    parts = [head("kvass simulate")]
    for trace, of_trace in _by_trace(results):
        parts.append(f"<h2>{html.escape(trace.name)}</h2>")
        parts.append(f"<p><b>{html.escape(advice(of_trace))}.</b></p>")
        parts.append("<h3>Hit rate by size of L1</h3>")
        parts.append(plot(_rates(of_trace), "size of L1", sizes=True, mark=_mark(of_trace)))
        for what, lines in _savings(of_trace):
            parts.append(f"<h3>{what.capitalize()} by size of L1</h3>")
            parts.append(plot(lines, "size of L1", sizes=True, what=what))
        parts.append("<h3>Hit rate over time</h3>")
        parts.append(plot(_over_time(trace, of_trace), "time (s)"))
        parts.append(f"<pre>{html.escape(chr(10).join(table(of_trace)))}</pre>")
    return "\n".join(parts) + "</html>\n"


def _by_size(
    results: Sequence[Result], name: Callable[[Setting], str], value: Callable[[Result], float]
) -> list[Line]:
    """A curve for each ``name``; x is log2 of L1's bytes."""
    curves: dict[str, set[tuple[float, float]]] = {}
    for r in results:
        s = r.outcome.setting
        curves.setdefault(name(s), set()).add((log2(s.l1_bytes), value(r)))
    return [(name, sorted(points)) for name, points in curves.items()]


def _rates(results: Sequence[Result]) -> list[Line]:
    """A curve of hit rates for each combination of swept options, and one of the optimal rate."""
    varying = _varying(results)
    of_best = [name for name in varying if name in ("chunk", "tails", "L2")]
    own = _by_size(results, lambda s: _name(s, varying) or "L1", lambda r: r.outcome.hit_rate)
    best = _by_size(results, lambda s: f"optimal {_name(s, of_best)}", lambda r: r.optimal)
    return own + best


def _savings(results: Sequence[Result]) -> Iterator[tuple[str, list[Line]]]:
    """What hits save: tokens, and prefill seconds if the prefill speed is known."""
    varying = _varying(results)

    def name(s: Setting) -> str:
        return _name(s, varying) or "L1"

    yield "tokens saved", _by_size(results, name, lambda r: r.outcome.hit_tokens)
    if results[0].outcome.setting.prefill_tokens_s:
        yield "prefill seconds saved", _by_size(results, name, lambda r: max(0.0, r.saved_s))


def _mark(results: Sequence[Result]) -> tuple[float, str] | None:
    """The place of ``knee`` in the plot, and the text beside it."""
    if (least := knee(results)) is None:
        return None
    size = least.outcome.setting.l1_bytes
    return log2(size), f"{KNEE:.0%} of all hits: {Size(size).rounded()}"


def _over_time(trace: Trace, results: Sequence[Result]) -> list[Line]:
    """The hit rate over time, by slices of it: a curve for each of the last few settings."""
    begin, each = trace.requests[0].time_s, max(trace.seconds / _SLICES, 1e-9)
    input_tokens = [0] * (_SLICES + 1)
    slices = [min(int((r.time_s - begin) / each), _SLICES) for r in trace.asking]
    for at, request in zip(slices, trace.asking, strict=True):
        input_tokens[at] += request.input_tokens
    lines, varying = [], _varying(results)
    for result in results[-len(_COLOURS) :]:
        hit = [0] * (_SLICES + 1)
        for at, tokens in zip(slices, result.outcome.hits, strict=True):
            hit[at] += tokens
        s = result.outcome.setting
        name = f"L1 {Size(s.l1_bytes).rounded()} {_name(s, varying)}"
        points = [(i * each, hit[i] / tokens) for i, tokens in enumerate(input_tokens) if tokens]
        lines.append((name, points))
    return lines


def _top(most: float) -> float:
    """The top of an axis: four times a round number, and at least ``most``."""
    unit = 10.0 ** floor(log10(max(most, 1.0) / 4))
    return next(4 * n * unit for n in (1, 2, 2.5, 5, 10) if 4 * n * unit >= most)


def plot(
    lines: Sequence[Line],
    label: str,
    sizes: bool = False,
    what: str = "hit rate",
    mark: tuple[float, str] | None = None,
) -> str:
    """A plot of ``what`` as SVG. x runs from the smallest to the largest x of all points. A hit
    rate runs from 0 to 100 %, all other values from 0 to a round number. ``sizes``: x is log2 of
    bytes. ``mark``: the x of a vertical line, and the text beside it."""
    xs = [x for _, points in lines for x, _ in points]
    low, span = min(xs), max(xs) - min(xs) or 1.0
    rate = what == "hit rate"
    top = 1.0 if rate else _top(max(y for _, points in lines for _, y in points))
    left, right, bottom = _MARGIN, _WIDTH - 8, _HEIGHT - _MARGIN

    def place(x: float, y: float) -> str:
        across = left + (x - low) / span * (right - left)
        return f"{across:.1f},{bottom - y / top * (bottom - 8):.1f}"

    legend = _HEIGHT + 18 * len(lines)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {legend}" role="img" aria-label="{what} by {label}">']
    for percent in range(0, 101, 25):
        y = top * percent / 100
        at = place(low, y).split(",")[1]
        value = f"{percent} %" if rate else f"{y:,.0f}" if y >= 1000 else f"{y:.4g}"
        parts.append(
            f'<path d="M{left} {at}H{right}" stroke="#8884"/>'
            f'<text x="{left - 6}" y="{at}" text-anchor="end">{value}</text>'
        )
    for i in range(5):
        x = low + span * i / 4
        text = Size(int(2**x)).rounded() if sizes else f"{x:,.0f}"
        across = place(x, 0).split(",")[0]
        parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_WIDTH // 2}" y="{bottom + 36}" text-anchor="middle">{label}</text>')
    if mark is not None:
        across = place(mark[0], 0).split(",")[0]
        parts.append(
            f'<path d="M{across} 8V{bottom}" stroke="currentColor" stroke-dasharray="4"/>'
            f'<text x="{across}" y="{bottom - 6}" text-anchor="middle">{mark[1]}</text>'
        )
    for i, (name, points) in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        row = _HEIGHT + 18 * i
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in points if sizes else []:
            cx, cy = place(x, y).split(",")
            parts.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{colour}"/>')
        parts.append(
            f'<rect x="{left}" y="{row}" width="12" height="12" fill="{colour}"/>'
            f'<text x="{left + 18}" y="{row + 11}">{html.escape(name)}</text>'
        )
    return "".join(parts) + "</svg>"
