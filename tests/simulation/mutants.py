"""Breaks of the core, made by hand, and which check notices each.

Law of this file: a break that nothing notices is a hole in the checks, and a break whose text is no
longer in the core says so instead of passing.

``python -m tests.simulation.mutants`` runs every break against every check and writes
``docs/mutants.md``; the test beside it only asks that something notices.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "mutants.md"


class StaleMutantError(Exception):
    """The core changed: this break does not apply any more, write it anew."""


@dataclass(frozen=True)
class Mutant:
    """``edits``: (file under ``kvass/core``, text that is in it exactly once, what it becomes)."""

    name: str
    law: int
    edits: tuple[tuple[str, str, str], ...]


def one(name: str, law: int, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, law, ((file, old, new),))


UNBROKEN = Mutant("unbroken", 0, ())

MUTANTS = [
    # ------------------------------------------------------------ law 2: ownership
    one(
        "a release by one rank counts for all",
        2,
        "custody.py",
        "        lease.owing.discard(rank)\n",
        "        lease.owing.clear()\n",
    ),
    one(
        "a release said twice counts twice",
        2,
        "custody.py",
        "        lease.owing.discard(rank)\n",
        "        lease.owing.pop()\n",
    ),
    one(
        "another instance's lease can be released",
        2,
        "checks.py",
        "if lease is not None and lease.instance != instance.id:",
        "if False:",
    ),
    one(
        "another instance's reservation can be settled",
        2,
        "checks.py",
        "if one is not None and one.instance != instance.id:",
        "if False:",
    ),
    one("a rank may speak for another", 2, "checks.py", "    if rank != own:\n", "    if False:\n"),
    one(
        "unknown ranks may be named",
        2,
        "checks.py",
        "if not 0 <= rank < instance.terms.ranks:",
        "if False:",
    ),
    one(
        "a second live session of a rank is admitted",
        2,
        "admission.py",
        "if terms.rank in instance.sessions:",
        "if False:",
    ),
    one(
        "readers are inferred from who is registered",
        2,
        "flows.py",
        "(0,) if msg.readers is None else msg.readers",
        "tuple(instance.workers)",
    ),
    one(
        "missing readers mean every rank",
        2,
        "flows.py",
        "(0,) if msg.readers is None else msg.readers",
        "msg.readers or tuple(range(instance.terms.ranks))",
    ),
    Mutant(
        "every rank owes a commit, replicas too",
        2,
        (
            ("flows.py", "named = instance.writers if", "named = tuple(instance.workers) if"),
            ("flows.py", "    if not instance.covers_all_shards(writers):\n", "    if False:\n"),
        ),
    ),
    one(
        "replicas count as writers",
        2,
        "registry.py",
        "sorted(r for r, w in self.workers.items() if w.writer)",
        "sorted(self.workers)",
    ),
    one(
        "any ranks will do as writers",
        2,
        "registry.py",
        "return shards == list(range(self.terms.world_size))",
        "return True",
    ),
    # ------------------------------------------------------------ law 3: slots being written
    one(
        "a late slot is freed at the deadline",
        3,
        "custody.py",
        '                    self.discard(one, "late")\n',
        '                    self.discard(one, "late")\n                    one.owing.clear()\n',
    ),
    one(
        "an abort by one rank settles for all",
        3,
        "custody.py",
        '            self.discard(one, "aborted")\n            one.owing.discard(rank)\n',
        '            self.discard(one, "aborted")\n            one.owing.clear()\n',
    ),
    one(
        "the dma grace is skipped",
        3,
        "custody.py",
        "max(one.dirty_until, now + self._timing.dma_grace_s)",
        "now",
    ),
    one(
        "two rows on one slot",
        3,
        "l1.py",
        "rows, one.free = np.split(one.free, [min(len(keys), len(one.free))])",
        "rows = one.free[: len(keys)]",
    ),
    one(
        "an extent set is handed over while a slot is quarantined",
        3,
        "l1.py",
        "if pins.any() or not ((state == FREE) | (state == READY)).all():",
        "if pins.any():",
    ),
    Mutant(
        "and the set's guard sleeps too",
        3,
        (
            (
                "l1.py",
                "if pins.any() or not ((state == FREE) | (state == READY)).all():",
                "if pins.any():",
            ),
            (
                "l1.py",
                '        assert (self.table.state[span] == FREE).all(), "an extent set in use was '
                'given away"\n',
                "",
            ),
        ),
    ),
    one(
        "the shard of a rank is its number",
        3,
        "registry.py",
        "layouts = [by_shard[s] for s in range(terms.world_size)]",
        "layouts = [instance.workers[s].layout for s in range(terms.world_size)]",
    ),
    one(
        "a rank is sent to another's shard",
        3,
        "l1.py",
        "tuple([self.extents.sets[i].bases for i in used.tolist()])",
        "tuple([self.extents.sets[i].bases[::-1] for i in used.tolist()])",
    ),
    one(
        "extents overlap",
        3,
        "extents.py",
        "self._free[i] = (start + n, length - n)",
        "self._free[i] = (start + n // 2, length - n // 2)",
    ),
    one(
        "a scheduler's loss cancels grants it had handed over",
        3,
        "custody.py",
        "            if not one.handed_over:\n                self.cancel(one, now)",
        "            if True:\n                self.cancel(one, now)",
    ),
    one(
        "a garbled scheduler's grants are taken back at once",
        3,
        "machine.py",
        "self.state.custody.presume_handed_over(who.instance)",
        "pass",
    ),
    one(
        "a session that owes commits is closed",
        3,
        "machine.py",
        "elif who is not None and self.state.custody.owes(who.instance, who.rank):",
        "elif False:",
    ),
    # ------------------------------------------------------------ law 4: publishing
    one(
        "a partial row is published",
        4,
        "custody.py",
        '            self.discard(one, "cleared")\n        one.owing.discard(rank)\n',
        '            self.discard(one, "cleared")\n        one.owing.clear()\n',
    ),
    one(
        "a dead writer's row is published",
        4,
        "custody.py",
        '                self.discard(one, "writer_lost")\n',
        "",
    ),
    one(
        "an aborted row is published once the others commit",
        4,
        "custody.py",
        '            self.discard(one, "aborted")\n',
        "",
    ),
    Mutant(
        "a commit after the discard publishes",
        4,
        (
            (
                "custody.py",
                "            for part in one.parts:\n                self.l1.discard(part.rows)\n",
                "",
            ),
            ("custody.py", "            if one.discarded:\n", "            if False:\n"),
        ),
    ),
    one("a row being written matches", 4, "l1.py", "self.table.state[found] == READY", "there"),
    one(
        "the index trusts a fingerprint",
        4,
        "index.py",
        "wrong = (rows == ABSENT) | (self._table.key[rows] != keys).any(axis=1)",
        "wrong = rows == ABSENT",
    ),
    one(
        "the index forgets what spilled",
        4,
        "index.py",
        "        return twins | (self._spilled[bucket] > 0)\n",
        "        return twins\n",
    ),
    one(
        "the reservation's deadline is ignored",
        5,
        "custody.py",
        "                if one.deadline <= now:\n",
        "                if False:\n",
    ),
    one(
        "a clear does not doom what is being written",
        4,
        "custody.py",
        "        if one.epoch != epoch:\n",
        "        if False:\n",
    ),
    one(
        "a clear leaves rows being written in the index",
        4,
        "l1.py",
        "        self.forget(ready)\n        one.index.clear()\n",
        "        self.forget(ready)\n",
    ),
    one(
        "a cleared row that is being read matches again",
        4,
        "l1.py",
        '        """READY ``rows`` stop matching now, and are freed once nobody reads them."""\n'
        "        self._unindex(rows)\n",
        "",
    ),
    one("a bad row stays", 8, "flows.py", "        state.l1.forget(rows)\n", ""),
    # ------------------------------------------------------------ laws 5-7: pins and room
    one(
        "the lease's deadline is ignored",
        5,
        "custody.py",
        "if lease is not None and lease.deadline <= now:",
        "if False:",
    ),
    one(
        "a renewed lease never lapses",
        5,
        "custody.py",
        "        self.ledger.wake_at(lease.deadline, lease.id)\n",
        "",
    ),
    one(
        "a match pins nothing",
        6,
        "custody.py",
        "        for part in parts:\n            self.l1.pin(part.rows)\n",
        "",
    ),
    one(
        "an ended lease does not unpin",
        6,
        "custody.py",
        "        self.ledger.drop_lease(lease)\n        for part in lease.parts:\n"
        "            self.l1.unpin(part.rows)\n",
        "        self.ledger.drop_lease(lease)\n",
    ),
    Mutant(
        "a pinned row is evicted",
        6,
        (
            (
                "rows.py",
                "(self.state[rows] == READY) & (self.pins[rows] == 0)",
                "self.state[rows] == READY",
            ),
            (
                "rows.py",
                '            assert not self.pins[rows].any(), "a pinned row was freed"\n',
                "",
            ),
        ),
    ),
    one(
        "a doomed row is never freed",
        7,
        "l1.py",
        "        if len(doomed):\n",
        "        if False:\n",
    ),
    one(
        "an asker's own prefix is evicted",
        6,
        "flows.py",
        "    protect = state.l1.table.clock\n",
        "    protect = 1 << 60\n",
    ),
    one(
        "the shallower chunk is evicted before the deeper",
        6,
        "l1.py",
        "oldest_first = rows[::-1] if",
        "oldest_first = rows if",
    ),
    one(
        "a lookup does not count as use",
        6,
        "flows.py",
        "            state.l1.touch(one, rows)\n",
        "            pass\n",
    ),
    one(
        "no set is ever handed over",
        6,
        "l1.py",
        "        return bool(chosen)\n",
        "        return False\n",
    ),
    # ------------------------------------------------------------ law 7: quiescence
    one(
        "a dead rank still owes its releases",
        7,
        "custody.py",
        "            self.release(lease, rank)\n",
        "            pass\n",
    ),
    one(
        "a dead rank still owes its commits",
        7,
        "custody.py",
        '            if rank in one.owing:\n                self.discard(one, "writer_lost")\n',
        '            if False:\n                self.discard(one, "writer_lost")\n',
    ),
    one(
        "a dead writer's slots wait for the reservation's deadline",
        7,
        "custody.py",
        "                self.ledger.wake_at(one.dirty_until, one.id)\n",
        "",
    ),
    one(
        "a scheduler's loss leaves its leases",
        7,
        "custody.py",
        "            if not lease.handed_over:\n                self.end_lease(lease)",
        "            pass",
    ),
    one(
        "cancelling leaves the ranks owing",
        7,
        "custody.py",
        "        one.owing.clear()\n        self._settle(one, now)\n",
        "        self._settle(one, now)\n",
    ),
    # ------------------------------------------------------------ laws 9-12
    one(
        "another boot is accepted", 9, "checks.py", "    if boot != state.config.boot:", "    if 0:"
    ),
    one(
        "the namespace forgets the layout",
        10,
        "registry.py",
        '                field("layer", layer, page)\n',
        "                pass\n",
    ),
    one(
        "a lost rank leaves its namespace open",
        10,
        "machine.py",
        "        instance.namespace = None if instance.missing else instance.namespace\n",
        "",
    ),
    one(
        "a refusal is not answered",
        11,
        "machine.py",
        "            self._send(session, Error(seq=message.seq, code=no.code, text=no.text))\n",
        "",
    ),
    one(
        "the share is not given back",
        12,
        "leases.py",
        "        left = self.bytes_of[one.instance] - one.size_bytes\n",
        "        left = self.bytes_of[one.instance]\n",
    ),
    one(
        "the share is not enforced",
        12,
        "flows.py",
        "state.quota - state.ledger.bytes_of.get(instance.id, 0)",
        "state.quota",
    ),
    one(
        "one key is granted twice in a message",
        12,
        "flows.py",
        "        lacking[:, np.delete(columns, once)] = False\n",
        "        pass\n",
    ),
    # ------------------------------------------------------------ layer groups (DESIGN section 4)
    one(
        "a hit may end where a window does not reach",
        4,
        "coverage.py",
        "        reachable &= missing < np.maximum(needed, first)\n",
        "        pass\n",
    ),
    one(
        "a window needs one chunk less than it does",
        4,
        "coverage.py",
        "        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens\n",
        "        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens + 1\n",
    ),
    one(
        "a hit leaves nothing spare",
        4,
        "coverage.py",
        "    end = max(first, end - spare)\n",
        "    spare = 0\n",
    ),
    one(
        "the whole prompt is pinned in every group",
        6,
        "flows.py",
        "        rows = f[begin:chunks]\n",
        "        rows = f[first:chunks]\n",
    ),
    one(
        "a hit that could reach further ends early",
        4,
        "coverage.py",
        "    return first + int(hits[-1]) + 1 if len(hits) else first\n",
        "    return first + int(hits[0]) + 1 if len(hits) else first\n",
    ),
    one(
        "a group's rows are granted as another's chunks",
        3,
        "flows.py",
        "        which=() if all(each == chunks for each in which) else which,\n",
        "",
    ),
    one(
        "windows are written where no full row is",
        6,
        "flows.py",
        "        lacking[~full] &= (~absent | lacking)[full].all(axis=0)\n",
        "        pass\n",
    ),
    one(
        "windows outlive the full row they need",
        6,
        "l1.py",
        '        if one.spec.layout.kind != "full":\n            return\n',
        "        return\n",
    ),
    one(
        "a bad row is dropped by its place in another group",
        8,
        "flows.py",
        "        begin = lease.chunks - len(part.rows)",
        "        begin = 0",
    ),
    one(
        "half a chunk for which there is no room is kept",
        3,
        "flows.py",
        "        _take_back(state, rows[i][kept:])\n",
        "        pass\n",
    ),
]


# ---------------------------------------------------------------- breaking


def broken_copy(mutant: Mutant, into: Path) -> Path:
    """A copy of the package with the break in it; what to put first on ``PYTHONPATH``."""
    package = into / "kvass"
    shutil.copytree(ROOT / "src" / "kvass", package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutant.edits:
        path = package / "core" / file
        text = path.read_text()
        if text.count(old) != 1:
            found = text.count(old)
            raise StaleMutantError(f"{mutant.name}: found {found} times in core/{file}: {old!r}")
        path.write_text(text.replace(old, new))
    return into


# ---------------------------------------------------------------- checking

_SEEDS = """
import sys
from kvass.testing.simulator import run_seed
for seed in range({seeds}):
    told = run_seed(seed, validate={validate})
    if told is not None:
        print(told.splitlines()[0])
        sys.exit(1)
"""


def _run(path: Path, *command: str) -> str:
    """What a check of the package at ``path`` found; empty if all was well."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode == 0:
        return ""
    lines = [x for x in done.stdout.splitlines() if x.startswith(("seed ", "FAILED ", "ERROR "))]
    assert lines, f"{command} could not run:\n{done.stdout}\n{done.stderr}"
    return "\n".join(lines)


def simulate(path: Path, seeds: int, validate: bool = True) -> str:
    """The first seed that fails, and how."""
    return _run(path, "-c", _SEEDS.format(seeds=seeds, validate=validate))


def unit_tests(path: Path, *args: str) -> str:
    """The tests that fail, a line each."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
    return _run(path, *pytest, *args)


_LAWS = ["tests/core", "--ignore=tests/core/test_model.py", "--ignore=tests/core/test_fuzz.py"]


def notice(mutant: Mutant) -> str:
    """The first check that notices, quickest first; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        return simulate(path, 12) or unit_tests(path, "-x", *_LAWS) or simulate(path, 300)


# ---------------------------------------------------------------- the table


def _seed(told: str) -> str:
    found = re.match(r"seed (\d+) failed: \w+: (?:(law \d+)|(.{0,48}))", told)
    return f"seed {found[1]}: {found[2] or found[3]}".replace("|", "/") if found else "-"


def _row(mutant: Mutant) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        sim, alone = simulate(path, 300), simulate(path, 300, validate=False)
        laws = unit_tests(path, *_LAWS).splitlines()
        model = unit_tests(path, "--hypothesis-profile=once", "tests/core/test_model.py")
        fuzz = unit_tests(path, "--hypothesis-profile=once", "tests/core/test_fuzz.py")
    first = laws[0].split("::")[1].split(" ")[0].split("[")[0] if laws else ""
    units = f"{len(laws)}: `{first}`" if laws else "-"
    cells = [
        mutant.name,
        str(mutant.law),
        _seed(sim),
        _seed(alone),
        units,
        "yes" if model else "-",
        "yes" if fuzz else "-",
    ]
    print("|", " | ".join(cells), "|", flush=True)  # noqa: T201
    return bool(sim or laws or model or fuzz), f"| {' | '.join(cells)} |"


_HEAD = """# Breaking the core on purpose

Each line is a break made by hand in a copy of `kvass/core`, and what noticed it. *Simulator*: the
first of 300 seeds that failed, with `validate()` after every event. *Witness alone*: the same with
`validate()` off, so that only what clients can see is judged. *Tests of laws*: how many of
`tests/core` failed, and the first. *Dictionary*, *fuzz*: the two Hypothesis tests.

`python -m tests.simulation.mutants` writes this page; `make test` asks for every break that some
check notices it.

| break | law | simulator | witness alone | tests of laws | dictionary | fuzz |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    """Write the table; 1 if anything went unnoticed."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(_row, MUTANTS))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(_HEAD + "\n".join(row for _, row in rows) + "\n")
    missed = [m.name for m, (caught, _) in zip(MUTANTS, rows, strict=True) if not caught]
    print(f"{len(MUTANTS)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
