"""The check of a vLLM against ``contract.TABLE``: it holds for what was tested, and sees what
differs. The table names what the connector uses, and no more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvass._version import TESTED_VLLM
from kvass.connectors.vllm import contract
from kvass.connectors.vllm.contract import differences, terms
from kvass.connectors.vllm.served import loads_in_step, verdict_on
from tests.support.vllm.fake_vllm import fake_vllm, installed, version_of

CONNECTOR = Path(contract.__file__).parent
"""Not imported here: the check runs where there is no torch."""
SOURCES = "".join(
    file.read_text()
    for file in CONNECTOR.glob("*.py")
    if file.name != "contract.py" and not file.name.startswith("blend")
)
"""Without the table itself, and without blend's, which are for one version of vLLM alone."""
RELIED_ON = {"THRESHOLD_BYTES", "validate_cudagraph_capturing_enabled"}
"""What ``transfer/`` relies on, where nothing of vLLM is imported."""
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
POOL, SPECS = "v1/core/block_pool.py", "v1/kv_cache_interface.py"


@pytest.fixture(scope="module", autouse=True)
def parsed_once() -> Iterator[None]:
    """Files that are alike in two packages are parsed once."""
    known: dict[bytes, contract.Names] = {}
    top_level = contract._top_level

    def once(file: Path) -> contract.Names:
        text = file.read_bytes() if file.exists() else b""
        return known.get(text) or known.setdefault(text, top_level(file))

    with mock.patch.object(contract, "_top_level", once):
        yield


def test_it_holds_for_the_installed_version() -> None:
    version = version_of(installed())
    assert version in TESTED_VLLM
    assert differences(installed(), version) == []
    assert differences(installed(), version, optional=True) == []


def everything(package: Path) -> list[str]:
    """What differs in a version that is newer than all others."""
    return [line for one in (False, True) for line in differences(package, "0.99.0", optional=one)]


def test_what_is_optional_is_looked_at_apart(tmp_path: Path) -> None:
    file = "v1/core/sched/scheduler.py"
    change = file, "def _handle_invalid_blocks(", "def _handle_renamed_blocks("
    package, version = fake_vllm(tmp_path, change), version_of(installed())
    assert differences(package, version) == []
    assert differences(package, version, optional=True) == [
        f"Scheduler._handle_invalid_blocks is not in {file}"
    ]
    assert loads_in_step(package, version), "a tested version is not looked at"
    assert not loads_in_step(package, f"{version}+fork")
    assert verdict_on(package, f"{version}+fork").caches


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (POOL, "def touch(self, blocks:", "def touch(self, group, blocks:", "touch(self, group, "),
        (POOL, "self.cached_block_hash_to_block", "self.renamed", "block_hash_to_block is not in"),
        (BASE, "num_computed_tokens: int", "num_computed_tokens: int = 0", "num_computed_tokens=0"),
        (BASE, "    def shutdown(", "    @abstractmethod\n    def new(self): ...\n\n"
         "    def shutdown(", "get_num_new_matched_tokens new save_kv_layer"),
        ("v1/core/sched/output.py", "num_scheduled_tokens: dict", "renamed: dict", "is not in"),
        ("_custom_ops.py", "sizes: torch.Tensor,\n    is_src_access_order_any: bool",
         "sizes: torch.Tensor,\n    order: bool", "swap_blocks_batch(src_ptrs, dst_ptrs, sizes, o"),
        (SPECS, "is_eagle_group: bool = False", "is_eagle_group: bool = True", "_group = True in"),
        (SPECS, "class MambaSpec(", "class StateSpec(", "MambaSpec.mamba_cache_mode is not in"),
        ("config/cache.py", '"""', "(", "CacheConfig.cache_dtype is not in config/cache.py"),
    ],
)  # fmt: skip
def test_it_sees_what_differs(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    found = differences(fake_vllm(tmp_path, (file, old, new)), version_of(installed()))
    assert any(said in line for line in found), found


def test_what_came_later_is_not_missed_before(tmp_path: Path) -> None:
    for file in {term.file for term in terms() if (installed() / term.file).exists()}:
        text = (installed() / file).read_text()
        for name in [term.name.split(".")[-1] for term in terms() if term.since]:
            text = text.replace(name, "renamed")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert differences(tmp_path, "0.30.9") == []
    missing = [term.name for term in terms() if term.since == (0, 31)]
    found = differences(tmp_path, "0.31.0rc1+cpu")
    assert [line.partition(" ")[0] for line in found] == missing != []


def test_a_folder_that_is_no_vllm_has_nothing(tmp_path: Path) -> None:
    assert len(everything(tmp_path)) == len(list(terms()))


def test_a_file_that_is_no_python_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_bytes(b"environment_variables = 1\0")
    assert len(everything(tmp_path)) == len(list(terms()))
    (tmp_path / "envs.py").write_bytes(
        "# coding: latin-1\nenvironment_variables = 'é'".encode("latin-1")
    )
    assert len(everything(tmp_path)) == len(list(terms())) - 1


# ---------------------------------------------------------------- the table


def test_the_connector_uses_what_the_table_names() -> None:
    names = {term.name.split(".")[-1] for term in terms()} - {"abstract"}
    assert names - set(re.findall(r"\w+", SOURCES)) == RELIED_ON


def test_the_table_names_what_the_connector_imports_and_overrides() -> None:
    named = {part for term in terms() for part in term.name.split(".")}
    named |= {Path(term.file).stem for term in terms()}
    imports = re.findall(r"from vllm\S* import (?:\(([^)]*)\)|([^(\n]*))", SOURCES)
    found = {one.strip().split(" as ")[0] for pair in imports for one in ",".join(pair).split(",")}
    assert found - {"", "__version__", "envs", "current_platform"} <= named
    text = (CONNECTOR / "connector.py").read_text()
    hooks = set(re.findall(r"^    def ([a-z]\w*)\(", text, re.MULTILINE))
    assert len(hooks) > 20
    assert hooks <= named
