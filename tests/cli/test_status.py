"""``kvass status`` and ``kvass top``: what they say of real daemons, well and unwell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.rows import Rows, flushed, wait_tier
from kvass.cli.bench.rig import WIDTH
from kvass.cli.detail import detail
from kvass.cli.main import main
from kvass.cli.report import WIDTH as COLUMNS
from kvass.cli.report import percent, report, size, span
from kvass.cli.top import rates
from kvass.client.health import load_trouble, tier_trouble, troubles
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import RankLayout
from tests.support.wire.raw_session import LAYOUT, RawSession

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


def said(daemon: Daemon, capsys: Captured, *argv: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a command."""
    status = main([*argv, "--socket", daemon.socket])
    return status, capsys.readouterr().out.splitlines()


@pytest.fixture
def own_fields(tmp_path: Path) -> dict[str, Any]:
    """The status of a daemon of this test alone."""
    with running_daemon(tmp_path, "16MiB") as daemon:
        return daemon.status()


def numbers(fields: dict[str, Any]) -> dict[str, int]:
    """The tokens that the only namespace counted since the start."""
    (namespace,) = fields["namespaces"]
    return {name: namespace[name] for name in ("lookup_tokens", "hit_tokens")}


def test_a_daemon_that_is_used(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "disk").mkdir()
    tier = f"disk:{tmp_path}/disk?capacity=16MiB"
    with running_daemon(tmp_path, "16MiB", tier=[tier]) as daemon, ExitStack() as ending:
        daemon.wait_until(l1_populated_bytes=16 << 20)
        _, lines = said(daemon, capsys, "status")
        assert f"pid {daemon.pid}  OK" in lines[0]
        at = lines.index("engines  none connected")
        assert lines[at + 1].endswith('says in its own log why: "kvass is off".')
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        keys = [os.urandom(WIDTH) for _ in range(3)]
        short = "  No lookup yet: prompts shorter than a block are neither looked up nor stored."
        assert short in said(daemon, capsys, "status")[1]
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(3), "the flush")
        rows.find([*keys, os.urandom(WIDTH)])
        status, lines = said(daemon, capsys, "status")
        assert (status, lines[0].rsplit(" ", 1)[1]) == (0, "OK")
        assert lines[1] == "memory   192.0 KiB of 16.0 MiB used (1.2 %), 3 rows, 0 evicted"
        assert lines[2].startswith("hit rate 75.0 % of 1,024 tokens since start, 75.0 % of 1,024")
        model = lines[lines.index(next(line for line in lines if line.startswith("model"))) + 1]
        assert "256 B" in model, "a token of a row of 64 KiB in chunks of 256"
        unknown = "how long prefill takes is not known yet"
        assert lines[3] == f"saved    768 tokens since start; {unknown}"
        (engine,) = (line for line in lines if line.startswith("mine"))
        assert f"{os.getpid()}  75.0 %    0s ago" in engine
        assert any(line.startswith("mine") for line in lines)
        assert short not in lines
        assert "up" in next(line for line in lines if line.startswith("disk:"))
        assert max(map(len, lines)) <= COLUMNS
        _, more = said(daemon, capsys, "status", "--verbose")
        assert any(line.split()[:2] == ["stored_rows", "3"] for line in more[len(lines) :])
        shown = {line.split()[0] for line in more if line.startswith("  ")}
        counters = daemon.status()["counters"]
        assert {name for name, n in counters.items() if n} <= shown
        assert not {name for name, n in counters.items() if not n} & shown
        assert "Lookups of requests that got blocks." in " ".join(more)
        assert said(daemon, capsys, "status", "--check") == (0, ["ok"])
        assert main(["status", "--json", "--socket", daemon.socket]) == 0
        fields = json.loads(capsys.readouterr().out)
        gone = [{"model": "gone", **{name: 2 * n for name, n in numbers(fields).items()}}]
        gone[0] |= {"saved_prefill_s": 63.0, "loads": 30, "failed_loads": 20}
        lines = list(report(fields | {"forgotten": gone}))
        assert lines[2].startswith("hit rate 75.0 % of 3,072 tokens since start, 75.0 % of 1,024")
        assert lines[3] == "saved    2,304 tokens since start; 1m3s of prefill", "what is known"
        page = (ROOT / "docs" / "wrong-tokens.md").read_text()
        for line in lines[1:4]:
            (written,) = re.findall(rf"^{line[:9]}.*$", page, re.M)
            assert re.findall("[a-z]{3,}", written) == re.findall("[a-z]{3,}", line)
        assert lines[4].startswith("loads    20 of 31 failed since start, 0 in the last minute")
        assert fields["counters"]["lapsed_leases"] == 0, "zeros are there"
        assert not any("answers" in line for line in lines)
        fields["namespaces"][0] |= {"answer_tokens": 2000, "repeated_tokens": 1500}
        told = "later prompts repeat 75.0 % of 2,000 tokens of answers"
        assert any(line.endswith(told) for line in report(fields))
        _, lines = said(daemon, capsys, "top", "--times", "2", "--every", "0.1")
        assert any(line.startswith("now      ") for line in lines)


def shadow_of(wrong_rows: int) -> dict[str, Any]:
    """What shadow mode found."""
    group = {"kind": "full", "group": 0, "largest_difference": 0.5, "at_value": 16.0}
    return {
        "lookup_tokens": 4000,
        "hit_tokens": 3000,
        "saved_s": 90.0,
        "not_compared": 1,
        "loads": 2,
        "load_bytes": 3 << 20,
        "load_s": 0.25,
        "wrong_rows": wrong_rows,
        "groups": [{**group, "wrong_rows": wrong_rows}],
    }


def test_what_shadow_mode_found_is_told_also_when_no_engine_is_left(
    own_fields: dict[str, Any],
) -> None:
    engine = {"instance": "e", "model": "m", "ranks": 1, "missing_ranks": [], "uids": [0]}
    own_fields["engines"] = [{**engine, "shadow": shadow_of(0)}, {**engine, "shadow": None}]
    rows = [line.split() for line in report(own_fields) if line.startswith("e  ")]
    assert [row[-2] for row in rows] == ["shadow", "-"], "its hits are none"
    own_fields["engines"] = []
    ns = {"namespace": "81f0c2d4" * 8, "model": "m", "groups": []}
    own_fields["namespaces"] = [{**ns, "shadow": shadow_of(0)}, {**ns, "shadow": None}, ns]
    own_fields["forgotten"] = [{"model": "old", "shadow": shadow_of(0)}, {"model": "older"}]
    text = " ".join(" ".join(report(own_fields)).split())
    assert "shadow old (removed namespaces): would hit 3,000 of 4,000 tokens" in text
    assert " OK memory" in text
    assert (
        "shadow m (81f0c2d4): would hit 3,000 of 4,000 tokens (75.0 %) and save 1m30s of prefill; "
        "2 loads of 3.0 MiB took 0.25 s; largest difference: full 0.5 at a value "
        "of 16; 1 hits not compared"
    ) in text


def test_wrong_rows_are_a_problem_that_leads_to_the_page(own_fields: dict[str, Any]) -> None:
    ns = {"namespace": "81f0c2d4" * 8, "model": "m", "groups": [], "shadow": shadow_of(2)}
    own_fields["namespaces"] = [ns]
    (line,) = troubles(own_fields)
    assert line == (
        "shadow mode found 2 wrong rows of m (namespace 81f0c2d4): loaded and computed KV differ "
        "by as much as the values; see docs/wrong-tokens.md"
    )
    text = " ".join(" ".join(report(own_fields)).split())
    assert " DEGRADED ! shadow mode found 2 wrong rows" in text
    assert "full 0.5 at a value of 16 (wrong rows: 2)" in text
    assert "  wrong_rows                 2" in "\n".join(detail(own_fields))


def test_where_l1_lies_on_several_nodes(own_fields: dict[str, Any]) -> None:
    own_fields["l1_node_bytes"] = {"0": 12 << 20, "1": 4 << 20}
    assert "on nodes 0: 12.0 MiB, 1: 4.0 MiB" in list(report(own_fields))
    assert any("l1_node_bytes" in x and x.endswith("1: 4.0 MiB") for x in detail(own_fields))
    own_fields["l1_node_bytes"] = {"0": 16 << 20}
    assert not [line for line in report(own_fields) if "nodes" in line]


def test_what_a_token_takes_is_told_by_kind_of_layers(own_fields: dict[str, Any]) -> None:
    def told(*kinds: str) -> list[str]:
        group = {"row_bytes": 1 << 20, "rows": 8, "used_bytes": 8 << 20}
        groups = [{"kind": kind, **group} for kind in kinds]
        groups[-1] |= {"rows": 1, "used_bytes": 1 << 20}
        fields = {"namespace": "0123456789", "like": "", "model": "m", "chunk_tokens": 1024}
        lines = report(own_fields | {"namespaces": [{**fields, "groups": groups}]})
        return [line for line in lines if "per token:" in line]

    assert told("full", "full") == [], "the table says it"
    assert told("full", "sliding_window") == [
        "  01234567 per token: full attention 1KiB, windows 1KiB (stored: 128B)"
    ]
    assert told("full", "kind of later") == [
        "  01234567 per token: full attention 1KiB, kind of later 1KiB (stored: 128B)"
    ]


def test_what_rests_since_the_last_daemon(own_fields: dict[str, Any]) -> None:
    rests = {"place": "/dev/shm/k", "started_empty": "", "adopted_rows": 3, "adopted_bytes": 4096}
    rests |= {"resting_bytes": 5 << 20, "resting_s": 43.0, "resting_pids": []}
    own_fields |= {"arena": rests, "up_s": 61.0}
    shown = " ".join(" ".join(report(own_fields)).split())
    assert "arena /dev/shm/k: adopted 3 rows, 4.0 KiB; 5.0 MiB rest for 43s more" in shown
    assert not troubles(own_fields)
    rests |= {"resting_s": None, "resting_pids": [12, 13]}
    shown = " ".join(" ".join(report(own_fields)).split())
    assert "5.0 MiB rest until the engines' processes 12, 13 have ended or said" in shown
    (line,) = troubles(own_fields)
    assert "the engines' processes 12, 13 may still write to them" in line
    own_fields["up_s"] = 59.0
    assert not troubles(own_fields), "they have time"
    own_fields["arena"] = {"place": "/dev/shm/k", "lacks_index": True}
    assert "L1 is not used to its full size" in troubles(own_fields)[0]


def test_an_engine_that_waits_for_a_rank_and_a_tier_without_room(
    tmp_path: Path, capsys: Captured
) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        fields = daemon.wait_until(l1_populated_bytes=16 << 20)
        engine = {"instance": "e", "model": "m", "uids": [7], "ranks": 2, "scheduler": True}
        fields["refusals"] = [
            {"instance": "x", "text": "too old", "age_s": 10},
            {"instance": "y", "text": "too old", "age_s": 100},
        ]
        fields["engines"] = [{**engine, "namespace": "", "missing_ranks": [1]}]
        fields["tiers"] = [broken(up=True, store_failures=33, stored_rows=0, full=1)]
        assert troubles(fields) == [
            "engine e waits for its ranks 1",
            "engine x was refused: too old",
            "tier disk:/d: stores fail: 33 failed, 0 did not, the disk is full",
        ]
        lines = list(report(fields))
        assert lines[0].endswith("DEGRADED")
        assert any("degraded" in line for line in lines)
        assert main(["status", "--check", "--socket", daemon.socket]) == 0
        daemon.kill()
        assert main(["status", "--check", "--socket", daemon.socket]) == 1
        assert "no daemon" in capsys.readouterr().err


def broken(**fields: Any) -> dict[str, Any]:
    """A tier's table."""
    return {"tier": "disk:/d", "flush_queue_rows": 0, "load_bytes_s": 0, **fields}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"up": False, "trouble": "refused"}, "down: refused"),
        ({"up": False}, "down: it has not been opened yet"),
        ({"up": True, "store_failures": 1, "stored_rows": 1000}, ""),
        (
            {"up": True, "store_failures": 30, "stored_rows": 1000, "failing_rows": 30, "full": 1},
            "stores fail: the last 30 rows were not stored, the disk is full",
        ),
        ({"up": True, "store_failures": 30, "stored_rows": 1000, "failing_rows": 0}, ""),
        ({"up": True, "store_failures": 5, "stored_rows": 5}, "stores fail: 5 failed, 5 did not"),
        (
            {"up": True, "store_failures": 5, "stored_rows": 4, "last_failure_s": 599.0},
            "stores fail: 5 failed, 4 did not",
        ),
        ({"up": True, "store_failures": 5, "stored_rows": 4, "last_failure_s": 600.0}, ""),
        (
            {"up": True, "store_failures": 15, "stored_rows": 0, "failing_rows": 15}
            | {"last_failure_s": 660.0},
            "stores fail: 15 failed, 0 did not",
        ),
        ({"up": True, "store_failures": 0, "stored_rows": 0, "trouble": "slow"}, "slow"),
    ],
)
def test_what_is_wrong_with_a_tier(fields: dict[str, Any], line: str) -> None:
    assert tier_trouble(broken(**fields)) == line


@pytest.mark.parametrize(
    ("minute", "all_", "when"),
    [
        ((0, 0), (500, 1000), ""),
        ((4, 0), (500, 1000), ""),
        ((5, 0), (500, 1000), ""),
        ((5, 4), (500, 1000), "since the start"),
        ((1, 1), (500, 1000), "since the start"),
        ((1, 1), (499, 1000), ""),
        ((0, 0), (5, 5), "since the start"),
        ((0, 0), (4, 4), ""),
        ((1, 0), (5, 6), ""),
        ((60, 6), (500, 1000), "in the last minute"),
        ((60, 5), (500, 1000), ""),
        ((0, 0), (499, 1000), ""),
    ],
)
def test_failed_loads_are_a_trouble_while_loads_fail_or_until_one_went_well(
    minute: tuple[int, int], all_: tuple[int, int], when: str
) -> None:
    ns = {"namespace": "0" * 64, "loads": all_[1], "failed_loads": all_[0]}
    line = load_trouble({**ns, "minute_loads": minute[0], "minute_failed_loads": minute[1]})
    assert (when in line) if when else not line


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"over_budget": True}, "up, over its write budget"),
        ({"over_budget": False}, "up"),
        ({"refused_records": 1200}, "up, 1,200 requests for records refused"),
        ({"refused_records": 0}, "up"),
        ({"over_budget": True, "trouble": "slow"}, "degraded, over its write budget"),
    ],
)
def test_a_spent_write_budget_is_shown_and_no_trouble(
    own_fields: dict[str, Any], fields: dict[str, Any], state: str
) -> None:
    own_fields["tiers"] = [broken(up=True, store_failures=0, stored_rows=0, **fields)]
    (line,) = (line for line in report(own_fields) if line.startswith("disk:"))
    assert line.split("  ")[1].strip() == state
    assert len(troubles(own_fields)) == ("trouble" in fields)


def test_long_names_give_way_and_no_name_moves_the_cursor(tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        fields = daemon.status()
    for name in ("a" * 300, "a\x1b[2J\nkvass  OK", "a" * 40 + ", ranks \x1b[2J"):
        engine = {"instance": name, "model": name, "uids": [1], "ranks": 1, "missing_ranks": [0]}
        fields["engines"] = [engine]
        fields["namespaces"] = [{"model": name, "namespace": "0" * 64, "groups": []}]
        assert max(map(len, report(fields))) <= COLUMNS
        assert all(line.isprintable() for line in report(fields))


def test_a_long_name_hides_neither_the_ranks_of_its_machine_nor_other_columns(
    own_fields: dict[str, Any],
) -> None:
    name = "7543df6c-f551-4288-b66b-06607efc89ba"
    engine = {"model": "/models/" + "m" * 80, "uids": [7], "ranks": 8, "missing_ranks": []}
    where = ["", ", ranks 8-15 of 16, 1 more daemon"]
    own_fields["engines"] = [{**engine, "instance": name + each} for each in where]
    lines = [line for line in report(own_fields) if name[:12] in line]
    assert [line.split()[2:4] for line in lines[:2]] == [["8/8", "7"]] * 2
    assert lines[2:] == ["  7543df6c-f55: ranks 8-15 of 16, 1 more daemon"]


def test_what_two_namespaces_of_a_model_differ_in(tmp_path: Path, capsys: Captured) -> None:
    same = {"model": "llama", "seed": "x" * 50}
    with running_daemon(tmp_path, "16MiB") as daemon, ExitStack() as ending:

        def engine(name: str, **fields: Any) -> str:
            peer = ending.enter_context(RawSession(daemon.socket).greet())
            return peer.register(name, **fields).namespace.hex()[:8]

        first = engine("a", identity={**same, "dtype": "float16"})
        engine("alone", identity={"model": "other"})
        second = engine("b", identity={**same, "dtype": "bfloat16", "seed": "y" * 50})
        third = engine(
            "c", identity={**same, "dtype": "float16"}, layout=RankLayout(LAYOUT.groups * 2)
        )
        text = " ".join(" ".join(said(daemon, capsys, "status")[1]).split())
    of = "of the same model; they differ in"
    assert f"{second} shares nothing with {first} {of} dtype: bfloat16, not float16; seed" in text
    assert f"{third} shares nothing with {first} {of} the layout of the KV cache" in text
    assert text.count("shares nothing") == 2


def test_rates_are_of_one_boot() -> None:
    moved = {"l1_in_bytes": 0, "l1_lent_bytes": 0}
    old = {"boot": "a", "namespaces": [], "tiers": [], "counters": moved}
    new = {
        **old,
        "namespaces": [{"lookups": 10, "lookup_tokens": 300, "hit_tokens": 200}],
        "counters": {"l1_in_bytes": 4 << 20, "l1_lent_bytes": 2 << 30},
    }
    first, second = rates((1.0, old), (3.0, new))
    assert first == "now      5.0 lookups/s, 100 of 150 tokens/s hit"
    assert second == "         memory 2.0 MiB/s in, 1.0 GiB/s out; tiers 0 B/s in, 0 B/s out"
    assert list(rates((1.0, {**old, "boot": "b"}), (3.0, new))) == []


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 TiB"]
    assert [percent(1, 3), percent(0, 5), percent(0, 0)] == ["33.3 %", "0.0 %", "-"]
    assert [span(s) for s in (0, 59.9, 3600, 90_061)] == ["0s", "59s", "1h0m", "1d1h"]


@pytest.mark.parametrize("command", [["top"], ["web", "--http", "127.0.0.1:0"]])
def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path, command: list[str]) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon:
        run = [sys.executable, "-m", "kvass", *command, "--socket", daemon.socket]
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a script's "&" ignores it
        process = subprocess.Popen(
            run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heard
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == b""
        assert process.returncode == 130
