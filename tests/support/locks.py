"""The locks, ``requirements/*.txt``: whether what is pinned fits together, and how a lock is made.

A lock holds for each Python that kvass is for: what only some of them need has a marker. Locks are
installed without looking at dependencies, so here is looked at what packages want. The comments at
the top of a lock say in lines of their own

- ``of``: what it is the lock of;
- ``beside``: the locks that are there when it is installed. It agrees with them;
- ``tolerated``: a requirement of a pinned package that nothing meets, and why.

``python -m tests.support.locks LOCK FOLDER...`` tells what packages want and do not find, and fails
if some of it is not tolerated. They are those of the folders and of this environment.
``python -m tests.support.locks --make UV LOCK...`` makes locks anew, with the program ``UV``. What
is pinned already keeps its version if it may.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final, NamedTuple

from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

FOLDER: Final = Path(__file__).parent.parent.parent / "requirements"
# The first and the newest of each, and those between that markers of packages name.
PYTHONS: Final = (
    *(f"3.11.{patch}" for patch in (0, 1, 2, 3, 4, 5, 8, 9, 15)),
    *(f"3.12.{patch}" for patch in (0, 1, 2, 3, 4, 8, 15)),
    *(f"3.13.{patch}" for patch in (0, 1, 2, 15)),
    "3.14.0",
)
# What the build of torch for CUDA brings: pip installs it with torch.
_WITH_TORCH: Final = ("cuda-", "nvidia-c", "nvidia-n")


class Unmet(NamedTuple):
    by: str
    wanted: str  # name and versions, or Python's
    there: str  # a version; "": none

    def __str__(self) -> str:
        return f"{self.by} wants {self.wanted}, and there is {self.there or 'none'}"


class Lock:
    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.txt"
        lines = self.path.read_text().splitlines()
        self.top = [line for line in lines if line.startswith("#")]
        self.pins = [Requirement(line) for line in lines if not line.startswith("#")]

    def said(self, what: str) -> list[str]:
        return [line.removeprefix(f"# {what}: ") for line in self.top if f"# {what}: " in line]

    @property
    def beside(self) -> list[Lock]:
        return [Lock(name) for line in self.said("beside") for name in line.split()]

    @property
    def tolerated(self) -> dict[str, str]:
        """Requirement to reason."""
        return dict(line.split(": ", 1) for line in self.said("tolerated"))

    def versions(self, python: str) -> dict[str, str]:
        """Name to version of what is installed with ``python``."""
        pins = [pin for pin in self.pins if _applies(pin.marker, python)]
        return {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}


def tolerated(locks: Iterable[Lock]) -> dict[str, str]:
    return {wanted: why for lock in locks for wanted, why in lock.tolerated.items()}


@cache
def _environment(python: str, extra: str) -> dict[str, str]:
    versions = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    here = {name: str(value) for name, value in default_environment().items()}
    return here | versions | {"extra": extra}


def _applies(marker: Marker | None, python: str, extra: str = "") -> bool:
    return marker is None or marker.evaluate(_environment(python, extra))


@cache
def _declared(package: Distribution) -> tuple[SpecifierSet, list[Requirement]]:
    """The Pythons that it is for, and what it wants."""
    metadata = package.metadata
    wanted = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return SpecifierSet(metadata["Requires-Python"] or ""), wanted


def packages(*folders: str) -> dict[str, Distribution]:
    """Name to package, of these folders' and this environment's; the first folder's comes first."""
    paths = [*folders, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = {canonicalize_name(p.name): p for p in distributions(path=paths[::-1])}
    return {str(name): package for name, package in found.items()}


def unmet(
    versions: Mapping[str, str],
    known: Mapping[str, Distribution],
    python: str,
    but: Sequence[str] = (),
) -> set[Unmet]:
    """What packages of these versions want and do not find among them, ``kvass`` with all extras.

    What they want is what the metadata of the ``known`` packages says for ``python``; ``but``: the
    packages that are not asked.
    """
    found = set()
    todo = [(name, "") for name in versions]
    todo += [("kvass", extra) for extra in known["kvass"].metadata.get_all("Provides-Extra", [])]
    seen = set()
    while todo:
        name, extra = asked = todo.pop()
        if asked in seen or name in but or name not in known:
            continue
        seen.add(asked)
        pythons, requirements = _declared(known[name])
        if not pythons.contains(python):
            found.add(Unmet(name, f"Python{pythons}", python))
        for wanted in requirements:
            if not _applies(wanted.marker, python, extra):
                continue
            other = canonicalize_name(wanted.name)
            there = versions.get(other, "")
            if there and wanted.specifier.contains(there, prereleases=True):
                todo += [(other, part) for part in wanted.extras]
            else:
                found.add(Unmet(name, f"{other}{wanted.specifier}", there))
    return found


def check(name: str, *folders: str) -> int:
    """Tell what is unmet here by a lock and those beside it; the status to exit with."""
    known = packages(*folders)
    there = {name: package.version for name, package in known.items()}
    python = platform.python_version()
    locks = [Lock(name), *Lock(name).beside]
    problems = unmet(there, known, python)
    for lock in locks:
        for pinned, version in lock.versions(python).items():
            if not SpecifierSet(f"=={version}").contains(there.get(pinned, "0")):
                wanted = f"{pinned}=={version}"
                problems.add(Unmet(lock.path.name, wanted, there.get(pinned, "")))
    reasons = tolerated(locks)
    wrong = [problem for problem in sorted(problems) if problem.wanted not in reasons]
    for problem in sorted(problems.difference(wrong)):
        print(f"tolerated: {problem}: {reasons[problem.wanted]}")
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if wrong else 0


# ---------------------------------------------------------------- how a lock is made


def compiled(lock: Lock, uv: str) -> Iterator[Requirement]:
    """What uv finds for all Pythons and systems."""
    beside = [str(pin) for other in lock.beside for pin in other.pins]
    own = {canonicalize_name(pin.name) for pin in Lock("torch").pins}
    unwanted = map(Requirement, tolerated([lock, *lock.beside]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts: dict[str, list[str]] = {
            "of": [word for line in lock.said("of") for word in line.split()],
            "beside": beside,
            "without": sorted({canonicalize_name(r.name) for r in unwanted} - own),
            "instead": [str(pin) for pin in Lock("torch").pins],
            "pins": [str(pin) for pin in lock.pins],  # uv keeps what it may of these
        }
        for file, lines in texts.items():
            (folder / file).write_text("".join(f"{line}\n" for line in lines))
        flags = "--universal --python-version 3.11 --no-annotate --no-header --quiet"
        files = "--constraints beside --excludes without --overrides instead --output-file pins of"
        command = [uv, "pip", "compile", *flags.split(), *files.split()]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        yield from map(Requirement, (folder / "pins").read_text().splitlines())


def body(lock: Lock, pins: Iterable[Requirement]) -> list[str]:
    """The lines of what is installed on Linux, beside what is there."""
    there = {str(pin) for other in [*lock.beside, Lock("torch")] for pin in other.pins}
    lines = []
    for pin in pins:
        on = [python for python in PYTHONS if _applies(pin.marker, python)]
        if len(on) == len(PYTHONS):
            pin.marker = None
        if on and str(pin) not in there and not pin.name.startswith(_WITH_TORCH):
            lines.append(str(pin))
    return lines


def make(name: str, uv: str) -> None:
    lock = Lock(name)
    lines = [*lock.top, *body(lock, compiled(lock, uv))]
    lock.path.write_text("".join(f"{line}\n" for line in lines))


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--make"]:
        for name in arguments[2:]:
            make(name, arguments[1])
        return 0
    return check(*arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
