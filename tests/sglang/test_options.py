"""Where the backend's options come from."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvass.connectors.sglang.options import StorageOptions
from kvass.engine import options
from kvass.errors import ConfigError


def read_options(extra: dict[str, object], env: dict[str, str]) -> StorageOptions:
    return options.read(extra, StorageOptions, env)


def test_the_extra_config_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text("socket: /file\ntag: file\nmodel_id: file\nl1_size: 1GiB\n")
    env = {
        "KVASS_CONFIG": str(file),
        "KVASS_TAG": "env",
        "KVASS_SOCKET": "/env",
        "KVASS_L1_SIZE": "2",
    }
    extra = {"kvass.socket": "/extra", "prefetch_threshold": 64, "backend_name": "kvass"}
    assert read_options(extra, env) == StorageOptions(socket="/extra", tag="env", model_id="file")


def test_values_of_the_environment_are_converted() -> None:
    found = read_options({}, {"KVASS_FIXED_WEIGHTS": "yes", "KVASS_DAEMON_UID": "root"})
    assert found == StorageOptions(fixed_weights=True, daemon_uid=0)
    assert read_options({}, {"KVASS_TAG": "", "KVASS_TENANT": "a"}) == StorageOptions()
    assert read_options({"kvass.tenant": "a"}, {}).tenant == "a"


@pytest.mark.parametrize(
    ("extra", "env", "text"),
    [
        ({"kvass.colour": 1}, {}, "unknown option 'kvass.colour'"),
        ({"kvass.tag": 1}, {}, "Expected `str`, got `int`"),
        ({}, {"KVASS_FIXED_WEIGHTS": "maybe"}, "Expected `bool`, got `str`"),
        ({"kvass.model_id": ""}, {}, "length >= 1"),
    ],
)
def test_a_wrong_option_is_one_line(
    extra: dict[str, object], env: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_options(extra, env)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_option_without_its_prefix_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert read_options({"socket": "/x"}, {}) == StorageOptions()
    assert "write it 'kvass.socket'" in caplog.text


def test_the_document_lists_the_options() -> None:
    page = (Path(__file__).parents[2] / "docs/sglang.md").read_text()
    listed = re.findall(r"^\| `(kvass\.\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(f.encode_name for f in msgspec.structs.fields(StorageOptions))
