"""One model, four sources: the same names everywhere, and nothing unknown anywhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.arena import room
from kvass.config import CONNECTION, Config, Parser, Size, add_flags, load, to_yaml
from kvass.errors import ConfigError
from kvass.types import Timing
from kvass.wire import places


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("3kB", 3000),
        ("4096", 4096),
        ("7B", 7),
        (" 2TiB ", 2 << 40),
        ("2G", 2_000_000_000),
        ("2Gi", 2 << 30),
        ("64mb", 64_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert Size.parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8Gix", "-8GiB", "8 GiB x", "1e9", "nan", "٣GiB", "1.GiB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 8GiB"):
        Size.parse(text)


@given(st.integers(0, 2**62))
def test_size_texts_parse_back(size: int) -> None:
    assert Size.parse(str(Size(size))) == size


def test_defaults() -> None:
    got = load({}, {})
    assert got.l1_size <= room.memory_bytes() / 4
    assert got.l1_size % (1 << 20) == 0
    assert (got.lease_s, got.lost_engine_grace_s) == (
        Timing().lease_s,
        Timing().lost_engine_grace_s,
    )
    assert (got.allow_uid, got.socket_group) == ([], "")
    assert (got.tier, got.flush, got.stop_s) == ([], "write_through", 10)
    assert (got.keep_loaded, got.skip_slow_loads) == (True, True)


def test_the_default_grace_outlasts_a_gpus_teardown() -> None:
    """The socket of a process that was killed may be at its end before its GPU is stopped: the
    release of a GPU's descriptors was seen to take 26 s, with 243 GB pinned (law 3)."""
    assert load({}, {}).lost_engine_grace_s == 30


def test_a_socket_is_given_or_empty() -> None:
    """What an empty one stands for is in ``wire/places.py``."""
    assert load({}, {}).socket == ""
    assert load({"socket": "/s"}, {}).socket == "/s"


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    numbers = "lease_s: 1\nreserve_s: 1\nlost_engine_grace_s: 0.5\nl1_size: 4MiB\n"
    file.write_text(numbers + "allow_uid: [3]\nsocket: /s\n")
    env = {"KVASS_LEASE_S": "2", "KVASS_RESERVE_S": "2", "KVASS_ALLOW_UID": "4,5", "HOME": "x"}
    got = load({"lease_s": "3", "socket": None}, env, str(file))
    assert (got.lease_s, got.reserve_s, got.lost_engine_grace_s) == (3, 2, 0.5)
    assert (got.lookup_budget_ms, got.l1_size, got.allow_uid) == (100, 4 << 20, [4, 5])
    assert load({}, {"KVASS_CONFIG": str(file)}).lease_s == 1


@pytest.mark.parametrize("others", [{"allow_uid": ["4"]}, {"socket_group": "users"}])
def test_others_need_a_socket_they_can_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, object]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"folder of this user alone: choose another --socket$"):
        load(others, {})
    file = tmp_path / "kvass.yaml"
    file.write_text("socket: /s\n")
    for named in (
        load(others | {"socket": "/s"}, {}),
        load(others, {"KVASS_SOCKET": "/s"}),
        load(others, {}, str(file)),
    ):
        assert named.socket == "/s"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(places, "SERVICE_FOLDER", str(tmp_path))
    load(others, {})  # /run/kvass is such a place


def test_every_option_comes_from_every_source(tmp_path: Path) -> None:
    values = {
        "socket": "/s",
        "daemon_uid": "9",
        "l1_size": "2MiB",
        "force_l1_size": "yes",
        "huge_pages": "2MiB",
        "numa": "0",
        "arena": "/dev/shm/kvass",
        "allow_uid": "9",
        "socket_group": "g",
        "lease_s": "1",
        "reserve_s": "2",
        "lost_engine_grace_s": "3",
        "lookup_budget_ms": "4",
        "tier": "disk:/t?capacity=1GiB",
        "flush": "on_evict",
        "keep_loaded": "no",
        "skip_slow_loads": "no",
        "keep_share": "0.5",
        "stop_s": "5",
        "quota": "a=1GiB:1KiB",
        "record": "/r",
        "record_size": "1MiB",
        "log_level": "debug",
        "log_format": "json",
        "http": "127.0.0.1:1",
        "http_host": "h",
        "http_token_file": "/a",
        "http_read_token_file": "/b",
    }
    assert set(values) == set(Config.__struct_fields__)
    by_env = load({}, {f"KVASS_{k.upper()}": v for k, v in values.items()})
    parser = Parser()
    add_flags(parser)
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in values.items()]
    by_flag = load(vars(parser.parse_args(flags)), {})
    file = tmp_path / "printed.yaml"
    file.write_text(to_yaml(by_env))  # what --print-config prints is a config file
    assert by_env == by_flag == load({}, {}, str(file))
    assert "l1_size: 2MiB" in file.read_text()
    assert (by_env.tier, by_env.flush, by_env.stop_s) == ([values["tier"]], "on_evict", 5)
    assert (by_env.keep_loaded, by_env.skip_slow_loads) == (False, False)


def test_tiers_in_order(tmp_path: Path) -> None:
    one, two = "disk:/a?capacity=1GiB", "redis:host?prefix=a%2Cb"
    file = tmp_path / "kvass.yaml"
    file.write_text(f"tier:\n  - {one}\n  - {two}\nkeep_loaded: no\nskip_slow_loads: yes\n")
    parser = Parser()
    add_flags(parser)
    flags = vars(parser.parse_args(["--tier", one, "--tier", two, "--keep-loaded", "yes"]))
    for got in (
        load({}, {}, str(file)),
        load({}, {"KVASS_TIER": f"{one},{two}"}),
        load(flags, {}, str(file)),
    ):
        assert got.tier == [one, two]
    assert load({}, {}, str(file)).keep_loaded is False
    assert load(flags, {}, str(file)).keep_loaded is True
    assert load(flags, {}, str(file)).skip_slow_loads is True


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"KVASS_LEASES": "1"}, "unknown option 'KVASS_LEASES' in the environment; did you mean"),
        ({"KVASS_L1_SIZE": "8Gigs"}, "KVASS_L1_SIZE: no size: '8Gigs'; write it like 8GiB"),
        ({"KVASS_L1_SIZE": "4095"}, "smaller than one row"),
        ({"KVASS_L1_SIZE": "9999999TiB"}, "more than the"),
        ({"KVASS_LEASE_S": "0"}, "KVASS_LEASE_S: Expected `float` > 0.0"),
        ({"KVASS_LEASE_S": "nan"}, "KVASS_LEASE_S"),
        ({"KVASS_LEASE_S": "inf"}, "KVASS_LEASE_S"),
        ({"KVASS_LEASE_S": "soon"}, "KVASS_LEASE_S"),
        ({"KVASS_ALLOW_UID": "1,x"}, "KVASS_ALLOW_UID"),
        ({"KVASS_ALLOW_UID": "-1"}, "KVASS_ALLOW_UID"),
        ({"KVASS_SOCKET": ""}, "socket path of 0 bytes: use 1 to 107 bytes"),
        ({"KVASS_SOCKET": "/" * 108}, "socket path of 108 bytes: use 1 to 107 bytes"),
        ({"KVASS_TIER": "disk"}, "tier 'disk': write SCHEME:WHERE?option=value, like disk:/"),
        ({"KVASS_TIER": "disk:/a?capacity=1GiB,floppy:/b"}, "unknown scheme 'floppy'; known: disk"),
        ({"KVASS_FLUSH": "later"}, "KVASS_FLUSH: say one of write_through, on_evict, none"),
        ({"KVASS_SKIP_SLOW_LOADS": "perhaps"}, "KVASS_SKIP_SLOW_LOADS: say one of yes, no"),
        ({"KVASS_STOP_S": "-1"}, "KVASS_STOP_S: Expected `float` >= 0.0"),
        ({"KVASS_CONFIG": "/no/such/file"}, "cannot read config /no/such/file"),
    ],
)
def test_bad_environment(env: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, env)
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lease: 3", "unknown option 'lease' in"),
        ("7: 3", "unknown option '7' in"),
        ("lease_s: '3'", "lease_s: Expected `float`, got `str`"),
        ("lease_s: yes", "lease_s: Expected `float`, got `bool`"),
        ("l1_size: true", "l1_size: no size"),
        ("l1_size: [1]", "l1_size: no size"),
        ("socket: 3", "socket: Expected `str`, got `int`"),
        ("allow_uid: 3", "allow_uid: Expected `array`, got `int`"),
        ("tier: disk:/a?capacity=1GiB", "tier: Expected `array`, got `str`"),
        ("keep_loaded: 'yes'", "keep_loaded: Expected `bool`, got `str`"),
        ("- lease_s", "write options as `name: value` lines"),
        ("a: [", "is no YAML"),
        ("lease_s: !!python/object:os.system x", "is no YAML"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, {}, str(file))
    assert line in str(caught.value)
    assert str(file) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("url", ["redis:h?password=hunter2&password=x", "kv:u:hunter2@h/p"])
def test_no_message_tells_a_secret(tmp_path: Path, url: str) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(f"tier: {url}\n")
    for flags, source in (({"tier": [url]}, None), ({}, str(file))):
        with pytest.raises(ConfigError) as caught:
            load(flags, {}, source)
        assert "hunter2" not in str(caught.value)
        assert "***" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["tier: redis:h?password={}: b", "tier: [redis:me:{}@h, ]: x", "a: {}"]
)
def test_a_file_that_is_no_yaml_is_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text("lease_s: 1\n" + text.format("%hunter2 @x7"))
    with pytest.raises(ConfigError, match="is no YAML: line 2, column ") as caught:
        load({}, {}, str(file))
    assert "hunter2" not in str(caught.value)
    assert "x7" not in str(caught.value)


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load({}, {}, str(tmp_path / "empty.yaml")) == load({}, {})


def test_abbreviated_and_unknown_flags_are_errors() -> None:
    parser = Parser(prog="kvass serve")
    add_flags(parser)
    for flag in ("--lease=3", "--nothing", "--l1-siz=4MiB"):
        with pytest.raises(ConfigError, match="see kvass serve --help"):
            parser.parse_args([flag])


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        ("0::/", "memory.max"),
        ("0::/system.slice/kvass.service", "system.slice/memory.max"),
        ("1:cpu:/x\n2:memory:/docker/1", "memory/docker/1/memory.limit_in_bytes"),
    ],
)
def test_cgroup_limits_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, file: str
) -> None:
    """Of the process's own cgroup, and of those around it."""
    own, limit = tmp_path / "proc/self/cgroup", tmp_path / "sys/fs/cgroup" / file
    for path in (own, limit):
        path.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(cgroup + "\n")
    monkeypatch.setattr(room, "room", partial(room.room, tmp_path))
    whole = room.memory_bytes()
    limit.write_text("max\n")
    assert room.memory_bytes() == whole
    limit.write_text("1073741824\n")
    assert room.memory_bytes() == 1 << 30
    with pytest.raises(ConfigError, match=r"more than the 1GiB"):
        load({"l1_size": "2GiB"}, {})


def test_what_kubernetes_sets_for_a_service_named_kvass_is_no_option() -> None:
    names = "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT PORT_9273_TCP PORT_9273_TCP_ADDR"
    for prefix in ("KVASS_", "KVASS_WEB_"):
        assert load({}, {prefix + name: "x" for name in names.split()}) == load({}, {})
    with pytest.raises(ConfigError, match="KVASS_PORTS"):
        load({}, {"KVASS_PORTS": "x"})


def test_an_unknown_name_gets_the_nearest_one(tmp_path: Path) -> None:
    """Options of engines are near ones, too."""
    file = tmp_path / "kvass.yaml"
    file.write_text("l1_siz: 4MiB\n")
    for env, says in (
        (
            {"KVASS_L1_SIZ": "4MiB"},
            "'KVASS_L1_SIZ' in the environment; did you mean KVASS_L1_SIZE?",
        ),
        ({"KVASS_CHUNK_TOKEN": "4"}, "did you mean KVASS_CHUNK_TOKENS?"),
        ({"KVASS_CONFIG": str(file)}, f"'l1_siz' in {file}:1; did you mean l1_size?"),
        ({"KVASS_COLOUR": "red"}, "there are socket, daemon_uid, l1_size, "),
    ):
        with pytest.raises(ConfigError) as caught:
            load({}, env)
        assert says in str(caught.value)


def test_one_file_and_one_environment_serve_daemon_and_engine(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text("socket: /s\nchunk_tokens: 512\nl1_size: 4MiB\n")
    got = load({}, {"KVASS_CONFIG": str(file), "KVASS_TAG": "a", "KVASS": "1"})
    assert (got.socket, got.l1_size) == ("/s", 4 << 20)


def test_which_source_wins_is_said(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text("lease_s: 1\nreserve_s: 2\ntier: ['redis:h?password=hunter2']\n")
    said: list[str] = []
    env = {"KVASS_LEASE_S": "3", "KVASS_RESERVE_S": "2", "KVASS_CONFIG": str(file)}
    got = load({"lease_s": "4", "tier": ["redis:i?password=hunter2"]}, env, None, said.append)
    assert (got.lease_s, got.reserve_s) == (4, 2)
    assert said == [
        f"option lease_s: 3.0 (KVASS_LEASE_S) wins over 1.0 ({file}:1: lease_s)",
        "option lease_s: 4.0 (--lease-s) wins over 3.0 (KVASS_LEASE_S)",
        f"option tier: ['redis:i?password=***'] (--tier) wins over ['redis:h?password=***'] "
        f"({file}:3: tier)",
    ]


def test_users_may_be_named() -> None:
    assert load({"socket": "/s", "allow_uid": ["root", "7"]}, {}).allow_uid == [0, 7]
    with pytest.raises(ConfigError, match="no-such-user"):
        load({"socket": "/s", "allow_uid": ["no-such-user"]}, {})


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("lease_s: 1\nlease_s: 2\n")
    with pytest.raises(ConfigError, match="lease_s stands there twice"):
        load({}, {}, str(tmp_path / "f"))


def test_sizes_for_people() -> None:
    assert [str(Size.parse(text)) for text in ("2G", "2Gi", "1.5GB")] == ["2GB", "2GiB", "1500MB"]
    assert [Size(n).rounded() for n in (7, 64 << 20, 1_999_998_976)] == ["7B", "64MiB", "1.86GiB"]


@pytest.mark.parametrize(("text", "nodes"), [("0", "0"), ("0,2-3", "0,2-3"), ("'1'", "1")])
def test_one_node_is_a_number_in_yaml(text: str, nodes: str, tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(f"numa: {text}\n")
    assert load({}, {}, str(file)).numa == nodes
    file.write_text("numa: true\n")
    with pytest.raises(ConfigError, match="numa: Expected `str`"):
        load({}, {}, str(file))


def test_help_says_every_default() -> None:
    parser = Parser(prog="kvass serve")
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    assert text.count("(default: ") == len(Config.__struct_fields__)
    assert "--lease-s S seconds that an engine may take to read a hit (default: 60)" in text
    assert "--keep-loaded yes|no keep rows that were" in text
    assert "(default: a quarter of the memory that this process may use, or less" in text


@pytest.mark.parametrize("file", [True, False])
def test_who_connects_needs_no_machine_like_the_daemons(tmp_path: Path, file: bool) -> None:
    """As in an engine's container, which has less memory, and other users."""
    options = {"l1_size": "9999TiB", "allow_uid": "no-such-user", "socket": "/run/kvass/s"}
    env = {f"KVASS_{name.upper()}": text for name, text in options.items()}
    if file:
        path = tmp_path / "kvass.yml"
        path.write_text("".join(f"{name}: {text}\n" for name, text in options.items()))
        env = {"KVASS_CONFIG": str(path)}
    assert load({}, env, wanted=CONNECTION).socket == "/run/kvass/s"
    for wrong in ({"KVASS_SOCKE": "x"}, {"KVASS_DAEMON_UID": "no-such-user"}):
        with pytest.raises(ConfigError):
            load({}, env | wrong, wanted=CONNECTION)
    with pytest.raises(ConfigError):
        load({}, env)
