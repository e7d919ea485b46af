"""The file of a day: what the card is, and of each stage its state and its figures.

Law of this file: at every instant the file is whole, and has all figures that were noted. Of one
that was cut on its way from the machine, what came through is read (``salvaged``).
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import time
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final

from kvass._version import __version__
from kvass.cli.bench.rig import say
from kvass.errors import ConfigError

BAD: Final = ("running", "failed", "cut", "wrong")
"""``running`` is a stage during which the machine went back."""
MEASURED: Final = ("done", "wrong")
"""It has all its figures."""

NAMED: Final = re.compile(r"(^|[\s.])\w*[Ee]rror\b.*: ?\S|: error:")


class Day:
    """``path`` is read and replaced with each call, so the stages' process and its parent may both
    write, in turns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All of it; an empty day if there is no file."""
        return read_day(self.path) if self.path.exists() else {"stages": {}}

    def about(self, facts: dict[str, str]) -> None:
        """What the card is. Raises ConfigError if the file is of another one, or another day."""
        day = self.read()
        if differ := [name for name in facts if day.get(name, facts[name]) != facts[name]]:
            raise ConfigError(f"{self.path} has another {differ[0]}")
        self._replace(facts | day)

    def begin(self, stage: str) -> None:
        """A stage begins. What it has of an earlier run goes."""
        self._change(stage, state="running", figures={})

    def note(self, stage: str, figures: dict[str, Any]) -> None:
        """A running stage has these figures, too."""
        before = self.read()["stages"][stage]["figures"]
        self._change(stage, figures=before | figures)

    def end(self, stage: str, state: str, why: str = "", seconds: float = 0.0) -> None:
        """Why it ended. A stage that is skipped keeps what it has of an earlier run."""
        if state == "skipped" and self.read()["stages"].get(stage, {}).get("figures"):
            return
        self._change(stage, state=state, why=why, seconds=round(seconds, 1))

    def take(self, stage: str, known: dict[str, Any]) -> None:
        """What another file has of a stage."""
        self._change(stage, **known)

    def states(self) -> dict[str, str]:
        """By stage."""
        return {name: one["state"] for name, one in self.read()["stages"].items()}

    def _change(self, stage: str, **fields: Any) -> None:
        day = self.read()
        day["stages"].setdefault(stage, {"figures": {}}).update(fields)
        self._replace(day)

    def _replace(self, day: dict[str, Any]) -> None:
        new = self.path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(day, indent=1))
        os.replace(new, self.path)


def read_day(path: Path) -> dict[str, Any]:
    """The day in a file, also in one that was cut. Raises ConfigError if there is nothing in it."""
    text = path.read_text(errors="replace")
    try:
        day = json.loads(text)
    except ValueError:
        day = salvaged(text)
        say(f"{path} is damaged; it has {', '.join(day.get('stages', ())) or 'nothing'}")
    if not isinstance(day, dict) or not isinstance(day.setdefault("stages", {}), dict):
        raise ConfigError(f"{path} is no file of a day")
    for one in day["stages"].values():
        one.setdefault("state", "running")  # it ended there
    return day


def salvaged(text: str) -> dict[str, Any]:
    """The longest beginning of ``text``, a JSON object of a line per value, that can be closed."""
    lines = text.splitlines()
    if lines and not lines[-1].endswith((",", "{", "[", "}", "]")):
        lines.pop()  # a number may lack its last digits
    while lines:
        ends = ""
        for line in map(str.strip, lines):
            if line.endswith(("{", "[")):
                ends = ("}" if line.endswith("{") else "]") + ends
            elif line.rstrip(",") in ("}", "]"):
                ends = ends[1:]
        with suppress(ValueError):
            found = json.loads("\n".join(lines).rstrip().removesuffix(",") + ends)
            return found if isinstance(found, dict) else {}
        lines.pop()
    return {}


def facts(smoke: bool) -> dict[str, str]:
    """What a figure depends on: the card and what drives it. torch is not imported."""
    card, driver = ("none: a fake", "-") if smoke else _card()
    torch = util.find_spec("torch")
    versions = Path(torch.origin or "").parent / "version.py" if torch else None
    cuda = runpy.run_path(str(versions)).get("cuda") if versions else None
    found = {"card": card, "driver": driver, "cuda": str(cuda)}
    found |= {name: _version(name) for name in ("torch", "vllm")}
    return found | {"kvass": __version__, "date": time.strftime("%Y-%m-%d")}


def last_words(error: BaseException) -> str:
    """The line of an error that says most: of the end of a log the last one that names an error."""
    lines = str(error).strip().splitlines() or [repr(error)]
    named = [line for line in lines if NAMED.search(line)]
    return (named or lines)[-1].strip()[:300]


def _card() -> tuple[str, str]:
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown", "unknown"
    card, _, driver = said.strip().partition(", ")
    return card, driver


def _version(name: str) -> str:
    for package in (name, f"{name}-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return "-"


# ---------------------------------------------------------------- a page


def page(days: list[dict[str, Any]]) -> str:
    """The Markdown of several days and cards, a column each. Files of one day and card are one."""
    from bench.gpu_day.decisions import decisions
    from bench.gpu_day.stages import STAGES

    columns: dict[tuple[str, ...], dict[str, Any]] = {}
    about = list(dict.fromkeys(name for day in days for name in day if name != "stages"))
    for day in days:
        same = columns.setdefault(tuple(day.get(n, "") for n in about), day | {"stages": {}})
        for name, one in day["stages"].items():
            same["stages"][name] = max(same["stages"].get(name, {}), one, key=_worth)
    found = list(columns.values())
    if not found:
        return "# What a GPU said\n\nNothing.\n"
    names = ("card", "date", "runner")
    heads = [", ".join(filter(None, (day.get(name) for name in names))) for day in found]
    rows = {name: [str(day.get(name, "")) for day in found] for name in about}
    parts = ["# What a GPU said", _table("", heads, rows)]
    answers = [decisions(day["stages"]) for day in found]
    rows = {question: [one[question] for one in answers] for question in answers[0]}
    parts += ["## What it decides", _table("", heads, rows)]
    subjects = {one.name: f"{one.subject} ({one.letter})" for one in STAGES}
    for name in dict.fromkeys([*subjects, *(n for day in found for n in day["stages"])]):
        stages = [day["stages"].get(name, {}) for day in found]
        if not any(stages):
            continue
        parts.append(f"## `{name}`: {subjects.get(name, 'unknown')}")
        flat = [_flat(one.get("figures", {})) for one in stages]
        figures = dict.fromkeys(figure for one in flat for figure in one)
        rows = {"": [_ended(one) for one in stages]}
        rows |= {figure: [one.get(figure, "") for one in flat] for figure in figures}
        parts.append(_table("figure", heads, rows))
    return "\n\n".join(parts) + "\n"


def _worth(stage: dict[str, Any]) -> tuple[bool, bool]:
    """Of what two files have of a stage the first that came to its end counts, or has figures."""
    return stage.get("state") in MEASURED, bool(stage.get("figures"))


def _ended(stage: dict[str, Any]) -> str:
    if not stage:
        return ""
    why = f": {stage['why']}" if stage.get("why") else ""
    return f"{stage['state']}{why} ({stage.get('seconds', '?')} s)"


def _flat(figures: dict[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name} ")
        elif isinstance(value, float):
            flat[before + name] = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        elif isinstance(value, bool):
            flat[before + name] = "yes" if value else "**NO**"
        else:
            flat[before + name] = str(value)
    return flat


def _table(first: str, heads: list[str], rows: dict[str, list[str]]) -> str:
    lines = [[first, *heads], ["---"] * (len(heads) + 1)]
    lines += [[name, *cells] for name, cells in rows.items()]
    return "\n".join("| " + " | ".join(c.replace("|", "/") for c in line) + " |" for line in lines)
