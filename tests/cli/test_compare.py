"""``kvass compare``: which fields of namespaces differ, of a real daemon."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows
from kvass.cli import compare
from kvass.cli.compare import lines, namespace_of
from kvass.cli.main import main
from kvass.testing.daemon import running_daemon

Captured = pytest.CaptureFixture[str]


def test_the_fields_in_which_engines_differ(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, ExitStack() as ending:

        def said(*names: str) -> tuple[int, list[str]]:
            status = main(["compare", *names, "--socket", daemon.socket])
            printed = capsys.readouterr()
            return status, (printed.out + printed.err).splitlines()

        assert said() == (0, ["no engine is connected"])
        Rows(daemon.socket, "mine", 64 << 10, ending)
        (first,) = (ns["namespace"][:8] for ns in daemon.status()["namespaces"])
        assert said() == (0, [f"all are in namespace {first}: they share KV"])
        Rows(daemon.socket, "other", 128 << 10, ending)
        second = daemon.status()["namespaces"][1]["namespace"][:8]
        status, told = said()
        assert told[0] == f"{first} and {second} share no KV. Equal fields: 3. Others:"
        at = told.index("  layer group 0")
        assert told[at + 1].startswith(f"    {first}  full, blocks of 16 tokens")
        assert "[65536] bytes" in told[at + 1]
        assert "[131072] bytes" in told[at + 2]
        assert said(first, second) == said("mine", "other") == (status, told)
        assert said("mine", first) == (0, [f"all are in namespace {first}: they share KV"])
        _, every = said("mine")
        assert {"chunk_tokens: 256", "ranks: 1"} < set(every)
        status, (text,) = said("x")
        assert (status, text) == (
            2,
            f"kvass: 'x' names no namespace; there are: {first}, {second}",
        )
        assert "names several namespaces" in said("mine", "")[1][0]
        Rows(daemon.socket, "third", 256 << 10, ending)
        monkeypatch.setattr(compare, "MOST", 2)
        assert said() == (0, [*told, "and 1 more"])


def test_the_id_of_an_engine_comes_before_what_begins_with_it() -> None:
    one, other = "ab" * 32, "cd" * 32
    ids = {"ab": other, "ab-2": one, "cd": ""}
    engines = [{"instance": name, "namespace": ns} for name, ns in ids.items()]
    fields = {"namespaces": [{"namespace": one}, {"namespace": other}], "engines": engines}
    assert [namespace_of(fields, name) for name in ("ab", "ab-", "aba", "cd")] == [
        *(other, one, one, other)
    ]


def test_namespaces_whose_fields_are_equal_differ_in_the_layout() -> None:
    same = {"model": "m"}
    assert list(lines("a" * 64, "b" * 64, {"a" * 64: same, "b" * 64: same})) == [
        "aaaaaaaa and bbbbbbbb share no KV. Equal fields: 1. Others:",
        "  the layout of the KV cache: which rank has which layers",
    ]
