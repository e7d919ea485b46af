"""The documents agree with the tree: each path, test, link, command and law they name exists."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from kvass.cli.main import COMMANDS, main
from kvass.daemon.live import LIVE
from tests import site_tables
from tests.simulation.mutants import MUTANTS

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ROOT / "src" / "kvass"
DOCS: Final = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
MAPS: Final = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "laws.md"]
"""All that looks like a path in these has to exist; in other documents only tests have to."""

PATH: Final = re.compile(r"(?P<path>[\w.*-][\w./*-]*)(?:::(?P<name>[\w.]+|(?<=txt::).+))?")
SUFFIXES: Final = (".py", ".md", ".toml", ".json", ".txt", ".c", "/")
LAW: Final = re.compile(r"\blaws? (\d+(?:(?:, | and |-)\d+)*)", re.IGNORECASE)


def text_of(document: Path) -> str:
    """A document without its blocks of code."""
    return without_code(document.read_text())


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def code_of(text: str) -> list[str]:
    """Lines of code: of fenced blocks, of indented ones, and what stands in backticks."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()]
    return lines + re.findall(r"^ {4}(\S.*)$", text, re.M) + re.findall(r"`([^`\n]+)`", text)


def wrong_paths(text: str, tests_only: bool = False) -> list[str]:
    """What is named as code in ``text``, looks like a path or ``path::name``, and is not there.

    Paths begin at the repository's root, in ``src/kvass`` or in ``tests``.
    """
    wrong = []
    for span in re.findall(r"`([^`\n]+)`", text):
        match = PATH.fullmatch(span)
        if match is None or not (match["path"].endswith(SUFFIXES) or match["name"]):
            continue
        path, name = match["path"], match["name"]
        if tests_only and not (path.startswith("tests/") or "test_" in path):
            continue
        found = [f for base in (ROOT, PACKAGE, ROOT / "tests") for f in base.glob(path)]
        if not found or (name and not any(defines(f, name) for f in found)):
            wrong.append(span)
    return wrong


def defines(file: Path, name: str) -> bool:
    """Whether a Python file defines each part of ``Class.method``, ``function`` or ``CONSTANT``, or
    a script has the story."""
    source = file.read_text()
    if file.suffix == ".txt":
        return f"== {name}\n" in source
    return all(
        re.search(rf"^\s*(?:(?:async )?def|class) {part}\b|^\s*{part}\b[^=\n(]*=", source, re.M)
        for part in name.split(".")
    )


def wrong_links(text: str, folder: Path) -> list[str]:
    """Relative links in ``text`` that lead nowhere; anchors of Markdown files included."""

    def leads_somewhere(link: str) -> bool:
        path, _, anchor = link.partition("#")
        target = folder / path
        if path and not target.exists():
            return False
        return not anchor or anchor in anchors(target.read_text() if path else text)

    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if "://" not in link and not leads_somewhere(link)]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a Markdown text."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def laws_named(text: str) -> set[int]:
    return {int(n) for found in LAW.findall(text) for n in re.findall(r"\d+", found)}


def laws() -> set[int]:
    headings = re.findall(r"^## Law (\d+): ", (ROOT / "docs" / "laws.md").read_text(), re.MULTILINE)
    return set(map(int, headings))


def sources() -> Iterable[Path]:
    for folder in (ROOT / "src", ROOT / "tests"):
        yield from folder.rglob("*.py")


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    text = text_of(document)
    assert wrong_links(text, document.parent) == []
    if "decisions" not in document.parts:  # these tell of their own time
        assert wrong_paths(text, tests_only=document not in MAPS) == []


def test_the_map_has_every_part_of_the_package() -> None:
    there = [path for path in PACKAGE.iterdir() if not path.name.startswith("_")]
    parts = {path.name for path in there if path.suffix == ".py"}
    parts |= {f"{path.name}/" for path in there if (path / "__init__.py").exists()}
    named = set(re.findall(r"`([\w/]+/|\w+\.py)`", text_of(ROOT / "ARCHITECTURE.md")))
    assert sorted(parts - named) == []


def test_a_law_that_is_named_is_in_the_list() -> None:
    assert laws() == set(range(1, len(laws()) + 1))
    unknown = {
        str(path.relative_to(ROOT)): named - laws()
        for path in sources()
        if (named := laws_named(path.read_text())) - laws()
    }
    assert unknown == {}


def test_every_law_names_a_test_and_every_mutant_is_one() -> None:
    text = (ROOT / "docs" / "laws.md").read_text()
    for law in text.split("\n## ")[1:]:
        assert re.search(r"::test_|\.txt::", law), law
    lines = re.findall(r"^- mutants? (.+)$", text, re.M)
    named = {mutant for line in lines for mutant in line.split('"')[1::2]}
    assert named
    assert sorted(named - {mutant.name for mutant in MUTANTS}) == []


def site() -> Callable[[str], str]:
    """Makes of a page what ``make docs`` makes of it before Sphinx parses it."""
    handlers: dict[str, Callable[[object, str, list[str]], None]] = {}
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    settings["setup"](SimpleNamespace(connect=handlers.__setitem__))

    def read(page: str) -> str:
        content = [page]
        handlers["source-read"](None, "", content)
        return content[0]

    return read


def test_the_site_has_all_tables_that_are_generated() -> None:
    read, used = site(), list[str]()
    for document in DOCS:
        page = document.read_text()
        used += site_tables.MARK.findall(page)
        filled = read(page)
        assert "<!-- table" not in filled, document
        assert wrong_links(without_code(filled), document.parent) == []
    assert sorted(used) == sorted(site_tables.TABLES)
    reference = read((ROOT / "docs" / "reference.md").read_text())
    for name in ("`--l1-size SIZE`", "`KVASS_LOG_LEVEL`", "`--every S`", "`lapsed_leases`"):
        assert f"| {name} |" in reference
    breaks = read((ROOT / "docs" / "mutants.md").read_text())
    assert [m.name for m in MUTANTS if f"\n| {m.name} | {m.law} | " not in breaks] == []
    with pytest.raises(KeyError):
        read("<!-- table: none -->\n")


def test_the_options_that_change_while_the_daemon_runs_are_named() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    (named,) = re.findall(r"The options that change are ([^.]+)\.", text)
    assert tuple(re.findall(r"`(\w+)`", named)) == LIVE


def test_every_page_of_the_docs_is_in_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert [page for page in pages if len(re.findall(rf"^{page}$", index, re.M)) != 1] == []


def test_every_page_that_the_program_names_is_there() -> None:
    """Its errors, problems and log lines send users to pages."""
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    pages = set(re.findall(r"\bdocs/[\w/.-]+\.md\b", code))
    assert len(pages) > 5
    assert sorted(page for page in pages if not (ROOT / page).exists()) == []


def test_no_file_points_to_a_document_outside_the_repository() -> None:
    outside = re.compile("DESIGN " + "section")
    assert [str(p) for p in (*sources(), *DOCS) if outside.search(p.read_text())] == []


def test_routers_have_the_versions_that_make_test_installs() -> None:
    pins = dict(re.findall(r"(?m)^(\S+)==(\S+)$", (ROOT / "requirements/routers.txt").read_text()))
    page = (ROOT / "docs/events.md").read_text()
    rows = re.findall(r"(?m)^\| (Dynamo's indexer|`vllm-router`),.*? \| ([\d.]+) \|", page)
    wanted = {"Dynamo's indexer": pins["ai-dynamo"], "`vllm-router`": pins["vllm-router"]}
    assert dict(rows) == wanted
    assert pins["ai-dynamo-runtime"] == pins["ai-dynamo"]


def test_every_command_and_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    documents, makefile = [path.read_text() for path in DOCS], (ROOT / "Makefile").read_text()
    code = [line for text in documents for line in code_of(text)]
    for target in (target for line in code for target in re.findall(r"^make (\w+)", line)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for module in (name for line in code for name in re.findall(r"python -m ([\w.]+)", line)):
        if module.split(".")[0] in ("kvass", "tests", "bench"):
            path = module.replace(".", "/")
            assert any([*ROOT.glob(f"{path}*"), *(ROOT / "src").glob(f"{path}*")]), module
    written = [used for line in code for used in re.findall(r"^kvass ([a-z]+)([^#]*)", line)]
    assert {command for command, _ in written} == set(COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        used = {f for c, rest in written if c == command for f in re.findall(r"--[\w-]+", rest)}
        assert sorted(used - known) == [], command


def test_negative_control_what_is_wrong_is_seen() -> None:
    assert wrong_paths("`core/rows/row_table.py` and `core/no_such.py`") == ["core/no_such.py"]
    assert wrong_paths("`tests/core/`, `tests/nowhere/`") == ["tests/nowhere/"]
    assert wrong_paths("`core/rows/row_table.py::READY`, `core/rows/row_table.py::no_such`") == [
        "core/rows/row_table.py::no_such"
    ]
    assert wrong_paths("`core/scripts/ranks.txt`, `core/scripts/ranks.txt::no such story`") == [
        "core/scripts/ranks.txt::no such story"
    ]
    assert wrong_paths("`config.json`", tests_only=True) == []
    assert wrong_paths("`core/test_none.py`", tests_only=True) == ["core/test_none.py"]
    text = "# A title\n[a](#a-title) [b](#no-title) [c](README.md) [d](NONE.md) [e](README.md#none)"
    assert wrong_links(text, ROOT) == ["#no-title", "NONE.md", "README.md#none"]
    assert laws_named(f"laws 2-4 and 12; (law {99})") == {2, 4, 12, 99}
