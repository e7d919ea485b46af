"""The check of a vLLM against ``vllm_contract.TABLE``: it holds for what was tested, and sees what
differs. Every name in the table is one that the connector uses."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shutil
from pathlib import Path

import pytest

from kvass import vllm_contract
from kvass._version import TESTED_VLLM
from kvass.vllm_contract import differences, release, terms

spec = importlib.util.find_spec("vllm")
assert spec is not None
assert spec.origin is not None
INSTALLED = Path(spec.origin).parent
CONNECTOR = Path(vllm_contract.__file__).parent / "connectors" / "vllm"
"""Not imported here: the check runs where there is no torch."""
VERSION = re.search(r"__version__ = version = '(.*?)'", (INSTALLED / "_version.py").read_text())
assert VERSION is not None


def copy(to: Path) -> Path:
    """The files of the installed vLLM that the table names."""
    for name in {term.file for term in terms()}:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(INSTALLED / name, to / name)
    return to


def changed(package: Path, file: str, old: str, new: str) -> list[str]:
    """What the check says after a change of one of its files; the newest version is assumed."""
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new, 1))
    found = differences(package, "0.99.0")
    (package / file).write_text(text)
    return found


def test_it_holds_for_the_installed_version_and_also_for_the_next_one() -> None:
    assert VERSION is not None
    assert VERSION[1] in TESTED_VLLM
    assert differences(INSTALLED, VERSION[1]) == []
    if release(VERSION[1]) >= (0, 32):
        assert differences(INSTALLED, "0.99.0") == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "v1/core/block_pool.py",
            "def touch(self, blocks:",
            "def touch(self, blocks, group:",
            r"BlockPool\.touch\(self, blocks, group\) in \S+ was BlockPool\.touch\(self, blocks\)",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/base.py",
            "num_computed_tokens: int",
            "num_computed_tokens: int = 0",
            "num_computed_tokens=0",
        ),
        ("v1/core/block_pool.py", "self.cached_block_hash_to_block", "self.renamed", "is not in"),
        ("v1/core/sched/output.py", "num_scheduled_tokens: dict", "renamed: dict", "is not in"),
        ("v1/kv_cache_interface.py", "is_eagle_group: bool = False", "is_eagle_group: bool = True",
         "is_eagle_group = True in"),
        ("v1/kv_cache_interface.py", "class MambaSpec(", "class StateSpec(", "MambaSpec"),
        ("config/cache.py", '"""', "(", "is not in config/cache.py"),
    ],
)  # fmt: skip
def test_it_sees_what_differs(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    package = copy(tmp_path)
    assert differences(package, "0.99.0") == []
    found = changed(package, file, old, new)
    assert any(re.search(said, line) for line in found), found


def test_a_new_abstract_hook_is_seen(tmp_path: Path) -> None:
    """The class could not be made."""
    file = "distributed/kv_transfer/kv_connector/v1/base.py"
    hook = "    @abstractmethod\n    def new_hook(self): ...\n\n    def shutdown(self):"
    (line,) = changed(copy(tmp_path), file, "    def shutdown(self):", hook)
    assert "new_hook" in line


def test_what_came_later_is_not_missed_before(tmp_path: Path) -> None:
    package = copy(tmp_path)
    file, old = "v1/kv_cache_interface.py", "kv_tp_replicas: int = 1"
    text = (package / file).read_text()
    if old not in text:
        pytest.skip("the installed vLLM is older")
    (package / file).write_text(text.replace(old, ""))
    assert differences(package, "0.30.9") == []
    assert differences(package, "0.31.0rc1+cpu") == [
        "KVCacheConfig.kv_tp_replicas is not in v1/kv_cache_interface.py"
    ]


def test_a_folder_that_is_no_vllm_has_nothing(tmp_path: Path) -> None:
    assert len(differences(tmp_path, "0.99.0")) == len(list(terms()))


SOURCES = "".join(file.read_text() for file in CONNECTOR.glob("*.py"))


def test_the_connector_uses_what_the_table_names() -> None:
    names = {term.name.split(".")[-1] for term in terms()} - {"abstract"}
    assert {name for name in names if not re.search(rf"\b{name}\b", SOURCES)} == set()


def test_every_name_that_is_imported_from_vllm_is_in_the_table() -> None:
    named = {part for term in terms() for part in term.name.split(".")}
    imported = re.findall(r"from vllm\S* import \(([^)]*)\)|from vllm\S* import ([^(\n]*)", SOURCES)
    names = {
        one.strip().split(" as ")[0] for pair in imported for one in "".join(pair).split(",")
    } - {"", "__version__", "envs", "current_platform"}
    assert names <= named, names - named


def test_every_hook_that_the_connector_overrides_is_in_the_table() -> None:
    text = (CONNECTOR / "connector.py").read_text()
    hooks = set(re.findall(r"^    def ([a-z]\w*)\(", text, re.MULTILINE))
    assert len(hooks) > 20
    assert hooks <= {term.name.split(".")[-1] for term in terms()}


def test_it_imports_nothing_of_vllm() -> None:
    assert "import vllm" not in inspect.getsource(vllm_contract)
