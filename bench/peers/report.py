"""A run as a page: Markdown for docs/benchmarks.md, and HTML in one file.

The text of the page is ``page.md``, beside this file; what stands in braces there is filled in.
Its section about SGLang has the figures of ``python -m bench --sglang``, written by hand.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

from markdown_it import MarkdownIt

from bench.peers.results import Results, Row

PAGE: Final = Path(__file__).with_name("page.md")
NAMES: Final = {
    "none": "no cache",
    "again": "no cache, 2nd engine",
    "lmcache": "LMCache",
    "lmcache_1": "LMCache, 1 thread",
    "kvass": "kvass",
    "offloading": "vLLM offloading",
    "local": "vLLM's own cache",
    "memcpy": "memcpy",
    "raw": "raw disk",
}
"""The columns, in this order."""
PEERS: Final = ("lmcache", "lmcache_1", "offloading")
"""What kvass is compared with."""
ALIKE: Final = 1.02
"""Medians that differ by less are alike, whatever the spread."""
BELOW: Final = "see below"
SHORT: Final = 40
"""Characters of a reason that stands in the table itself."""
GOAL_PERCENT: Final = 1.0
WHY: Final = {
    "store": "kvass copies with one thread, torch with one per core. More copy threads would "
    "change it, where one does not use all of the memory's bandwidth",
    "load": "as for the store: more copy threads",
    "ping": "the daemon answers from one Python thread. A faster loop would change it; an engine "
    "sends a few requests a step",
    "start": "most of it is Python's imports. Fewer imports would change it",
    "memory": "it is Python with numpy. Fewer imports would change it",
    "idle": "the daemon wakes up to look after deadlines. Fewer timers would change it",
    "disk_write": "kvass has written to the disk by then, LMCache's adapter to the page cache (the "
    "next row has both on the disk). Writing to the page cache would change it, and take memory",
    "disk_sync": "what is left to the raw disk is the prompt's way into memory, before the first "
    "write, and file system blocks that are written for the first time",
    "disk_read": "after a restart kvass tries two ways to read, and one of them is slow where "
    "shared memory has pages of 4 KiB (see the machine). The other one copies each byte once more. "
    "Huge pages of shared memory save the copy (`echo advise` into `shmem_enabled`; decision 046)",
    "left": "neither leaves anything behind",
    "restart": "at SIGTERM the daemon flushes what is not on disk yet (`--stop-s`)",
    **dict.fromkeys(
        ("document_found", "rag_found", "chat_found", "agent_found"),
        "kvass and vLLM's offloading find all whole blocks, and nothing can find more",
    ),
    "document": "what is left is the engine's own work on the last tokens, which no cache changes. "
    "vLLM's offloading asks no other process",
    "rag": "all compute the question's tokens, and that takes most of the time. Blended reuse of "
    "documents would change it, where answers may differ",
    "chat": "all compute each new turn, and that takes most of the time. A cache cannot change it",
    "agent": "all generate the same tokens, and that takes most of the time. A cache cannot "
    "change it",
    "new_short_switched": "a short answer is where kvass costs most: its lookup wakes a daemon "
    "with cold caches (about 1 ms), and each step has about 0.1 ms of hooks in Python. Where the "
    "quartiles reach below 0, chance is a part of the figure. Not asking for short prompts would "
    "change it, and lose their hits",
    "new": "two engine processes differ by more than kvass costs: compare the noise, the time in "
    "the connector's hooks, and kvass on against off in one engine",
    "short": "a short hit saves little, whoever has it. kvass asks another process for it, and "
    "vLLM's offloading asks none",
    "down_back": "how often a client tries to connect again. Shorter pauses would change it",
}
"""By the beginning of a row's name: why kvass may not lead there, and what would change it."""


# ---------------------------------------------------------------- judging a row


def verdict(row: Row) -> tuple[str, bool]:
    """What a row shows, and whether kvass leads (or meets its goal) outside the spread."""
    if "kvass" not in row.samples:
        return "no figure of kvass", False
    if row.part == "new":
        return _cost(row)
    peers = [name for name in PEERS if name in row.samples]
    if not peers:
        return ("**kvass**" if " within " in row.trouble.get("lmcache", "") else ""), True
    peer = (max if row.more else min)(peers, key=row.median)
    ours, theirs = row.median("kvass"), row.median(peer)
    (low, high), (their_low, their_high) = row.spread("kvass"), row.spread(peer)
    near, far = sorted((abs(ours), abs(theirs)))
    if not (low > their_high or their_low > high) or far <= near * ALIKE:
        return "no clear lead", False
    by, leader = f" {number(far / near)}x" if near else "", NAMES[peer].partition(",")[0]
    return (f"**kvass**{by}", True) if (ours > theirs) == row.more else (f"{leader}{by}", False)


def _cost(row: Row) -> tuple[str, bool]:
    if row.median("kvass") <= GOAL_PERCENT:
        return "goal met", True
    if "again" not in row.samples:
        return "goal missed", False
    noise = max(map(abs, row.spread("again")))
    return f"goal missed (noise: {noise:.1f} %)", False


def behind(rows: Sequence[Row]) -> list[str]:
    """The rows in which kvass does not lead, each with the reason and what would change it."""
    judged = [(row, *verdict(row)) for row in rows]
    return [f"- {row.what} ({found}): {_why(row)}." for row, found, leads in judged if not leads]


def _why(row: Row) -> str:
    if "kvass" in row.trouble:
        return row.trouble["kvass"]
    return next((why for name, why in WHY.items() if row.name.startswith(name)), "not known yet")


# ---------------------------------------------------------------- the page


def markdown(results: Results) -> str:
    """The page."""
    about = [f"- {name}: {what}" for name, what in (results.machine | results.versions).items()]
    parts = {row.part for row in results.rows}
    values = {
        "began": results.began,
        "minutes": f"{results.minutes:.0f}",
        "rounds": str(results.rounds),
        "repetitions": str(results.repetitions),
        "machine": "\n".join(about),
        "behind": "\n".join(behind(results.rows)) or "In no row that both were measured in.",
        **{f"table {part}": table(results.rows, part) for part in parts},
    }
    return re.sub(r"\{([\w ]+)\}", lambda m: values.get(m[1], "Not measured."), PAGE.read_text())


def table(rows: Sequence[Row], part: str) -> str:
    """One line a row, a column for each system that any of them has; below it, what is too long
    for a cell."""
    rows = [row for row in rows if row.part == part]
    systems = [s for s in NAMES if any(s in row.samples or s in row.trouble for row in rows)]
    lines = [["", "unit", *(NAMES[system] for system in systems), "leads", "load"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = [cell(row, system) for system in systems]
        load = f"{median(row.loads):.1f}" if row.loads else ""
        lines.append([row.what, row.unit, *cells, verdict(row)[0], load])
    reasons = {
        f"- {NAMES[system]}: {_plain(row.trouble[system])}"
        for row in rows
        for system in row.trouble
        if cell(row, system) == BELOW
    }
    text = "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)
    return "\n".join([text, *([""] if reasons else []), *sorted(reasons)])


def cell(row: Row, system: str) -> str:
    """``median (low to high)``, the reason why there is none, or nothing."""
    if system not in row.samples:
        reason = row.trouble.get(system, "")
        return reason if len(reason) <= SHORT else BELOW
    middle = number(row.median(system))
    if len(row.samples[system]) == 1:
        return middle
    low, high = map(number, row.spread(system))
    return f"{middle} ({low} to {high})"


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(text: str) -> str:
    """Text that does not end a cell of a table."""
    return " ".join(text.replace("|", "/").split())


# ---------------------------------------------------------------- as HTML

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100%; font-size: 13px }
th, td { padding: 4px 8px; text-align: left; vertical-align: top; border-bottom: 1px solid #9ab4 }
code { background: #8aa3; padding: 0 3px }
:root { color-scheme: light dark }
"""


def web_page(text: str) -> str:
    """The same page as one file that loads nothing; links of the repository become plain text."""
    body = MarkdownIt().enable("table").render(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text))
    title = html.escape(text.splitlines()[0].lstrip("# "))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    return f"{head}<style>{STYLE}</style>\n{body}</html>\n"
