"""The dashboard in a real browser, of a daemon with real figures."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.rows import Rows, flushed, wait_tier
from kvass.cli.bench.rig import WIDTH
from kvass.core.metrics import MISSES
from kvass.testing.daemon import Daemon, running_daemon
from kvass.web.server import WebServer
from tests.support.browser import Browser, Page, running_browser
from tests.support.waiting import eventually
from tests.web import picture
from tests.web.test_server import serving

ROW = 64 << 10


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "disk").mkdir()
    with running_daemon(folder, "16MiB", tier=[f"disk:{folder}/disk?capacity=64MiB"]) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def web(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """It has seen an engine with traffic: 3 of 4 chunks hit, in the second of two samples."""
    with ExitStack() as ending:
        server = ending.enter_context(serving(daemon.socket, tmp_path_factory.mktemp("web")))
        rows = Rows(daemon.socket, "some-model", ROW, ending)
        server.source.sample()
        keys = [os.urandom(WIDTH) for _ in range(3)]
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(3), "the flush")
        rows.find([*keys, os.urandom(WIDTH)])
        daemon.wait_until(leases=1)
        time.sleep(1.1)  # the source's status is no older
        server.source.sample()
        yield server


def shown(browser: Browser, web: WebServer, width: int = 1100, dark: bool = False) -> Page:
    """The page, once it has its figures."""
    page = browser.page(width, dark=dark)
    page.open(web.url)
    assert eventually(lambda: page.text("#clock") != "")
    return page


def asks(page: Page) -> Page:
    """The page, once it has asked again."""
    page.run("refresh()")
    return page


def test_it_shows_what_the_daemon_did(browser: Browser, web: WebServer, daemon: Daemon) -> None:
    page = shown(browser, web)
    assert f"on {os.uname().nodename}, version" in page.text("#about")
    assert "1engines connected" in page.text("#working")
    assert "75.0 %hit rate since start" in page.text("#saving")
    assert "768tokens not computed since start" in page.text("#saving")
    assert "192 KiB of 16 MiB memory used" in page.text("#lacking")
    assert "l1 75.0 %" in page.text("#rate")
    assert "with disk 75.0 %" in page.text("#rate")
    assert "disk in" in page.text("#moved")
    assert "held 192 KiB" in page.text("#legend")
    assert "192 KiB" in page.text("#tiers")
    assert "leases (read)1" in page.text("#leases")
    assert "default75.0 %" in page.text("#tenants")
    assert "a daemon is up" in page.text("#events")
    assert "engine" in page.text("#events")
    assert page.text("#clock").endswith("Times are in UTC (UTC).")
    assert page.run("document.getElementById('no-engines').hidden")
    assert page.errors == []


def test_the_picture_in_the_docs_is_of_this_page(browser: Browser, web: WebServer) -> None:
    """If not: ``python -m tests.web.picture``."""
    page = shown(browser, web)
    assert picture.words_of(picture.PICTURE.read_bytes()) == picture.words(page)
    png = picture.picture(page)
    assert struct.unpack(">I", png[16:20]) == (picture.WIDTH,)
    assert picture.words_of(png) == picture.words(page)
    page.run("document.querySelector('main h2').textContent = 'another label'")
    assert picture.words_of(png) != picture.words(page)


def test_an_engine_is_told_by_its_model_and_its_processes(
    browser: Browser, web: WebServer, daemon: Daemon
) -> None:
    page, (engine,) = shown(browser, web), daemon.status()["engines"]
    row = page.text("#engines tbody tr")
    assert row.startswith("kvass bench" + engine["instance"])
    assert "75.0 %768 tokensnot known yet" in row, "it has told no speed"
    assert f"{os.getpid()}uid {os.getuid()}1 of 1connected" in row
    since = time.time() - engine["connected_s"]
    shown_since = page.text("#engines td:nth-child(2)")
    assert shown_since in [time.strftime("%H:%M", time.gmtime(since + s)) for s in (-1, 0, 1)]


def test_charts_have_axes_with_units(browser: Browser, web: WebServer) -> None:
    page = shown(browser, web)
    labels = "charts.{}.plot.axes[{}]._values.filter(x => x)"
    assert page.run(labels.format("rate", 1)) == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert page.run(labels.format("memory", 1))[-1] == "16 MiB"
    assert page.run(labels.format("moved", 1))[-1].endswith("iB/s")
    times = page.run(labels.format("memory", 0))
    assert times
    assert all(re.fullmatch(r"\d\d:\d\d(:\d\d)?", time) for time in times)
    drawn = """{ const c = document.querySelector('#rate canvas');
        c.getContext('2d').getImageData(0, 0, 70, c.height).data.some(x => x) }"""
    assert page.run(drawn)
    page.run("{ const c = document.querySelector('#rate canvas'); c.width = c.width }")
    assert not page.run(drawn)


def test_the_pointer_shows_the_values_of_its_time(browser: Browser, web: WebServer) -> None:
    """A sample may be added, and the page may be laid out again, at any time."""
    page = shown(browser, web)
    size = {"width": 1100, "height": 4000, "deviceScaleFactor": 1}
    page.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
    assert eventually(lambda: page.run("innerHeight") == 4000)

    def times() -> list[float]:
        return [when for when, *_ in web.source.history()["samples"]]

    def clock(when: float) -> str:
        return time.strftime("at %H:%M:%S", time.gmtime(when))

    def at(share: float) -> str:
        left, top, width = page.run(
            "{ const b = document.querySelector('#memory .u-over').getBoundingClientRect();"
            " [b.left, b.top, b.width] }"
        )
        page.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + share * width, y=top + 9)
        return page.text("#memory .legend")

    def first() -> float:
        """Where the first sample is. The chart has a minute or more."""
        return 1 - (times()[-1] - times()[0]) / max(60, times()[-1] - times()[0])

    assert eventually(lambda: at(0.999) == "L1 used 192 KiB" + clock(times()[-1]))
    assert eventually(lambda: at(first() + 0.001) == "L1 used 0 B" + clock(times()[0]))
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert eventually(
        lambda: page.text("#memory .legend") == "L1 used 192 KiB" + clock(times()[-1])
    )


def test_a_models_or_tenants_own_figures_can_be_chosen(browser: Browser, web: WebServer) -> None:
    page = shown(browser, web)
    choose = "{{ whose.value = {!r}; whose.dispatchEvent(new Event('change')) }}"
    assert page.run("[...whose.options].map(option => option.value)") == [
        *("", "model/kvass bench", "tenant/default")
    ]
    for one in ("", "model/kvass bench", "tenant/default"):
        page.run(choose.format(one))
        assert "not in the cache 25.0 %" in page.text("#reasons")
        assert "not in the cache25.0 %256" in page.text("#misses")
    page.run("whose.append(new Option('other/one', 'model/other/one'))")
    page.run(choose.format("model/other/one"))
    assert "No misses in this time." in page.text("#reasons")
    assert "25.0 %" not in page.text("#misses")
    whole = {"what": "hit", "by": "disk", "of": "model", "whose": "org/model"}
    assert page.run("column('hit/disk/org/model')") == whole
    whole = {"what": "missed", "by": "late", "of": "tenant", "whose": "a"}
    assert page.run("column('tenant-missed/late/a')") == whole
    assert page.errors == []


def test_every_reason_of_a_miss_has_words(browser: Browser, web: WebServer) -> None:
    """One that this page does not know is shown as it is called."""
    page = shown(browser, web)
    assert MISSES.keys() <= set(page.run("Object.keys(REASONS)"))
    assert page.run("[reason('late'), reason('some_new_one')]") == [
        "tiers too slow",
        "some new one",
    ]


SHADOW = {
    "sampled": 0.1,
    "lookup_tokens": 1000,
    "hit_tokens": 640,
    "saved_s": 90.0,
    "loads": 7,
    "load_s": 1.5,
    "load_bytes": 3 << 20,
    "compared_bytes": 2 << 20,
    "not_compared": 4,
    "differing_rows": 3,
    "wrong_rows": 1,
    "groups": [
        {
            "group": 0,
            "kind": "full",
            "largest_difference": 0.25,
            "at_value": 16.0,
            "compared_bytes": 2 << 20,
        },
        {
            "group": 1,
            "kind": "state",
            "largest_difference": 0.0,
            "at_value": 0.0,
            "compared_bytes": 0,
        },
    ],
}


@pytest.mark.parametrize("shadow", [SHADOW, None])
def test_engines_in_shadow_mode_have_a_section(
    browser: Browser, daemon: Daemon, web: WebServer, tmp_path: Path, shadow: Any
) -> None:
    fields = daemon.status()
    fields["engines"][0] |= {"shadow": shadow, "pids": [0]}
    if shadow is None:
        fields["engines"][0]["lookup_tokens"] = 0
    fields["namespaces"][0]["shadow"] = shadow
    with serving(daemon.socket, tmp_path) as web:
        web.source._newest = lambda: fields  # type: ignore[method-assign]
        page = shown(browser, web)
        assert page.run("document.getElementById('shadow').hidden") is (shadow is None)
        assert "not knownuid" in page.text("#engines"), "the pid of a process that is not seen"
        assert ("shadow mode" in page.text("#engines")) is (shadow is not None)
        assert ("nonesee shadow mode" in page.text("#engines")) is (shadow is not None)
        assert page.run("document.getElementById('no-lookups').hidden") is (shadow is not None)
        if shadow is None:
            return
        cards = page.text("#would")
        assert "64.0 %would-be hit rate" in cards
        assert "1.5 minof prefill would have been saved" in cards
        assert "1.5 sis what 7 loads of 3 MiB took" in cards
        assert "0.25largest difference; 3 rows differ, 1 are wrong" in cards
        assert "10 %64.0 %1.5 min1.5 s2 MiB4 hits31 wrong" in page.text("#shadows")
        assert "0 full0.250 at a value of 16.02 MiB" in page.text("#differences")
        assert "1 state00 B" in page.text("#differences")
        assert page.errors == []


def test_problems_and_notes_stand_at_the_top(
    browser: Browser, daemon: Daemon, web: WebServer, tmp_path: Path
) -> None:
    fields = daemon.status() | {"tiers": []}
    fields |= {"problems": ["the arena is not used"], "notes": ["L1 is forced"]}
    fields["engine_cache_bytes"] = 9 << 20
    with serving(daemon.socket, tmp_path) as web:
        web.source._newest = lambda: {**fields}  # type: ignore[method-assign]
        page = shown(browser, web)
        assert page.text("#state") == "degraded"
        assert page.text("#troubles") == "the arena is not used"
        assert page.text("#notes").startswith("L1 is forcedL1 of 16MiB is less than twice")
        fields |= {"problems": [], "notes": [], "engine_cache_bytes": 0}
        assert eventually(lambda: asks(page).text("#state") == "up")
        hidden = "document.getElementById('notes').hidden"
        assert page.run(hidden), "there are none"
        assert page.errors == []


@pytest.mark.parametrize("spent", [True, False])
def test_a_tier_whose_write_budget_is_spent(
    browser: Browser, daemon: Daemon, web: WebServer, tmp_path: Path, spent: bool
) -> None:
    fields = daemon.status()
    fields["tiers"][0]["over_budget"] = spent
    with serving(daemon.socket, tmp_path) as web:
        web.source._newest = lambda: fields  # type: ignore[method-assign]
        text = shown(browser, web).text("#tiers")
        assert ("up, over its write budget" in text) is spent


def test_lines_are_broken_where_there_is_no_sample(browser: Browser, web: WebServer) -> None:
    """A daemon that was away, or began again, is neither a line through that time nor a negative
    rate. Numbers of another server, which may stand elsewhere, are dropped."""
    page = shown(browser, web)
    assert page.run("line([[0, 1], [10, 2], [90, 3]])") == [[0, 10, 89, 90], [[1, 2, None, 3]]]
    samples = "[[0, 5, 50], [10, 9, 90], [20, 1, 10], [30, 3, 30]]"
    page.run(f"past.columns = ['leases', 'lookups']; past.samples = {samples}")
    assert page.run("growth()") == [
        {"at": 10, "seconds": 10, "lookups": 40},
        {"at": 30, "seconds": 10, "lookups": 20},
    ]
    for columns, kept in ((["leases", "lookups", "new"], 5), (["lookups", "leases"], 1)):
        page.run(f"past.columns = ['leases', 'lookups']; past.samples = {samples}")
        page.run(f"remember({{columns: {columns}, samples: [[40, 1, 2]], events: []}})")
        assert page.run("past.samples.length") == kept


OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
CARDS_IN_A_ROW = """[...document.querySelectorAll('.cards')]
  .filter(cards => cards.offsetParent).map(cards => {
    const tops = [...cards.children].map(card => card.offsetTop);
    return [...new Set(tops)].map(top => tops.filter(other => other === top).length) })"""


@pytest.mark.parametrize(("width", "in_a_row"), [(360, 2), (400, 2), (720, 4), (970, 4), (1440, 4)])
def test_nothing_overflows_and_rows_of_cards_are_even(
    browser: Browser, web: WebServer, width: int, in_a_row: int
) -> None:
    page = shown(browser, web, width)
    page.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.run("innerWidth") == width
    assert not page.run(OVERFLOWS)
    ns = {"model": "org/a-model-with-a-long-name", "namespace": "a" * 64, "shadow": SHADOW}
    assert not page.run(f"{{ shadow([{json.dumps(ns)}]); {OVERFLOWS} }}")
    page.run("shadow([])")
    rows = page.run(CARDS_IN_A_ROW)
    assert [row for cards in rows for row in cards] == [in_a_row] * (3 * 4 // in_a_row)
    page.run("document.querySelector('#engines td').style.whiteSpace = 'nowrap'")
    page.run("document.querySelector('#engines td').textContent = 'x'.repeat(300)")
    assert page.run(OVERFLOWS)


def test_times_are_in_the_browsers_time_zone(browser: Browser, web: WebServer) -> None:
    page = browser.page()
    page.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    page.open(web.url)
    assert eventually(lambda: page.text("#clock").endswith("Times are in Asia/Tokyo (UTC+9)."))
    (when, *_), *_ = web.source.history()["samples"]
    hours = tuple(time.strftime("%H:", time.gmtime(t + 9 * 3600)) for t in (when, time.time()))
    assert page.run("charts.memory.plot.axes[0]._values").pop().startswith(hours)
    assert page.text("#events time").startswith(hours)
    page.run("Date.prototype.getTimezoneOffset = () => 210")
    assert page.run("zone()").endswith("(UTC−3:30)")


def test_the_dark(browser: Browser, web: WebServer) -> None:
    """Text stands out from what is behind it, on the page and in charts."""
    for dark in (False, True):
        page = shown(browser, web, dark=dark)
        assert page.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
        color = page.run("getComputedStyle(document.body).color")
        assert (color == "rgb(255, 255, 255)") is dark
        axis = page.run("charts.rate.plot.axes[1].stroke()")
        assert axis == ("#a8adb3" if dark else "#5f6368")
        assert page.errors == []


def test_all_that_scrolls_or_acts_is_reached_by_the_keyboard(
    browser: Browser, web: WebServer
) -> None:
    page = shown(browser, web)
    seen = []
    for _ in range(6):
        page.press("Tab")
        seen.append(
            page.run("{ const e = document.activeElement; e.id || e.ariaLabel || e.textContent }")
        )
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") in (
            "solid",
            "none",
        )
        if seen[-1] == "All counters":
            break
    assert seen == ["whose", "events", "Layer groups", "All counters"]
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_daemon_that_does_not_answer_leaves_no_number_that_looks_true(
    browser: Browser, tmp_path: Path
) -> None:
    grey = "getComputedStyle(document.querySelector('main')).filter === 'grayscale(1)'"
    with running_daemon(tmp_path, "16MiB") as daemon, serving(daemon.socket, tmp_path) as web:
        page = shown(browser, web)
        assert "No engine is connected. Start one" in page.text("#no-engines")
        assert not page.run("document.getElementById('no-engines').hidden")
        assert not page.run(grey)
        os.kill(daemon.pid, signal.SIGSTOP)
        assert eventually(lambda: page.text("#state") == "down")
        os.kill(daemon.pid, signal.SIGCONT)  # it follows the daemon by itself; below it is told to
        said = page.text("#away")
        assert said.startswith("The daemon does not answer.What was seen: no answer within 2 s.")
        assert re.search(r"The figures below are those of \d\d:\d\d:\d\d, .* ago\.$", said)
        assert page.run(grey)
        assert eventually(lambda: asks(page).text("#state") == "up")
        assert not page.run(grey)
        assert page.run("document.getElementById('away').hidden")
        daemon.kill()
        assert eventually(lambda: "no daemon at" in asks(page).text("#away"))
        late = browser.page()
        late.open(web.url)
        assert eventually(lambda: "There are no figures" in late.text("#away"))
        daemon.start()
        assert eventually(lambda: asks(page).text("#state") == "up")
        assert "the daemon is gone" in page.text("#events")
        web.shutdown()
        web.server_close()
        assert eventually(lambda: "server does not answer" in asks(page).text("#away"))
        assert page.run(grey)


def test_a_token_is_asked_for_and_kept(browser: Browser, daemon: Daemon, tmp_path: Path) -> None:
    with serving(daemon.socket, tmp_path, http_read_token_file=str(tmp_path / "token")) as web:
        page = browser.page()
        page.open(web.url)
        assert eventually(lambda: page.run("document.activeElement?.id") == "token")
        page.call("Input.insertText", text="0123456789abcdef")
        page.press("Tab")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        assert eventually(lambda: asks(page).text("#state") == "up")
