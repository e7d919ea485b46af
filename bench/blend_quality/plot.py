"""A plot of lines as SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP = 640, 360, 60, 20
BOTTOM, RIGHT = HEIGHT - 50, WIDTH - 130


def plot(lines: Mapping[str, Sequence[tuple[float, float]]], colours: Mapping[str, str]) -> str:
    """SVG text of ``lines`` of (share recomputed, accuracy), both 0 to 1, by name."""

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x * (RIGHT - LEFT), BOTTOM - y * (BOTTOM - TOP)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text((LEFT + RIGHT) / 2, HEIGHT - 12, "share of cached tokens computed again", _MIDDLE),
        text(LEFT, TOP - 6, "accuracy", _MIDDLE),
    ]
    for step in range(6):
        share = step / 5
        (x, low), (left, y), (right, _) = place(share, 0), place(0, share), place(1, share)
        parts += [
            f'<path d="M{left:.0f} {y:.0f}H{right:.0f}" stroke="#d0d7de"/>',
            text(left - 8, y + 4, f"{share:.1f}", 'text-anchor="end"'),
            text(x, low + 18, f"{100 * share:.0f} %", _MIDDLE),
        ]
    for index, (name, points) in enumerate(lines.items()):
        places = [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        colour = f'"{colours[name]}"'
        parts.append(f'<polyline points="{path}" fill="none" stroke={colour} stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill={colour}/>' for x, y in places]
        y = TOP + 20 + 20 * index
        parts.append(text(RIGHT + 20, y, name, f"fill={colour}"))
    return "\n".join([*parts, "</svg>\n"])


_MIDDLE = 'text-anchor="middle"'
