"""The dashboard in a real browser, of a daemon with real figures."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows, flushed, wait_tier
from kvass.cli.bench.rig import WIDTH
from kvass.testing.daemon import Daemon, running_daemon
from kvass.web.server import WebServer
from tests.support.browser import Browser, Page, running_browser
from tests.support.waiting import eventually
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
    assert eventually(lambda: page.text("#state") in ("up", "degraded"))
    return page


def test_it_shows_what_the_daemon_did(browser: Browser, web: WebServer) -> None:
    page = shown(browser, web)
    cards = page.text("#cards")
    assert "75.0 %of tokens hit since start" in cards
    assert "768tokens saved" in cards
    assert "192.0 KiBof 16.0 MiB L1 used" in cards
    assert "l1 75.0 %" in page.text("#rate-legend")
    assert "with disk 75.0 %" in page.text("#rate-legend")
    assert page.run("document.querySelectorAll('#rate polyline').length") == 2
    assert page.run("document.querySelector('#rate polyline').points.length") >= 1
    assert "disk in" in page.text("#moved-legend")
    assert "held 192.0 KiB" in page.text("#legend")
    assert "kvass bench" in page.text("#models")
    assert "192.0 KiB" in page.text("#tiers")
    assert "1/1" in page.text("#engines")
    assert "read1" in page.text("#leases")
    assert "absent256" in page.text("#misses")
    assert "default256.0 KiBnone" in page.text("#tenants")
    assert "a daemon is up" in page.text("#events")
    assert "engine" in page.text("#events")
    assert page.errors == []


def test_a_models_own_hit_rate_can_be_chosen(browser: Browser, web: WebServer) -> None:
    page = shown(browser, web)
    page.run("{ model.value = 'unnamed'; model.dispatchEvent(new Event('change')) }")
    assert "l1 75.0 %" in page.text("#rate-legend")
    page.run("{ model.append(new Option('other/one')); model.value = 'other/one'; charts() }")
    assert "l1 –" in page.text("#rate-legend")
    whole = {"what": "hit", "tier": "disk", "whose": "org/model"}
    assert page.run("column('hit/disk/org/model')") == whole
    assert page.errors == []


def test_a_phone_and_the_dark(browser: Browser, web: WebServer) -> None:
    """No horizontal scrolling but inside tables; text stands out from what is behind it."""
    for dark in (False, True):
        page = shown(browser, web, 360, dark)
        assert page.run("innerWidth") == 360
        assert page.run("document.documentElement.scrollWidth") <= 360
        color, behind = (
            page.run(f"getComputedStyle(document.body).{name}") or ""
            for name in ("color", "backgroundColor")
        )
        bright = page.run("matchMedia('(prefers-color-scheme: dark)').matches")
        assert bright is dark
        assert (color == "rgb(255, 255, 255)") is dark, (color, behind)
        assert page.errors == []


def test_all_that_scrolls_or_acts_is_reached_by_the_keyboard(
    browser: Browser, web: WebServer
) -> None:
    page = shown(browser, web)
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(
            page.run("{ const e = document.activeElement; e.id || e.ariaLabel || e.tagName }")
        )
    assert [name for name in dict.fromkeys(seen) if name not in ("BODY", "")] == [
        "model",
        "models",
        "tenants",
        "tiers",
        "engines",
        "events",
        "SUMMARY",
    ]
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_it_follows_the_daemon_by_itself(browser: Browser, tmp_path: Path) -> None:
    with running_daemon(tmp_path, "16MiB") as daemon, serving(daemon.socket, tmp_path) as web:
        page = shown(browser, web)
        daemon.kill()
        assert eventually(lambda: page.text("#state").startswith("down: no daemon"))
        daemon.start()
        assert eventually(lambda: page.text("#state") == "up")
        assert "the daemon is gone" in page.text("#events")
        web.shutdown()
        web.server_close()
        assert eventually(lambda: page.text("#state").startswith("down: "))


def test_a_token_is_asked_for_and_kept(browser: Browser, daemon: Daemon, tmp_path: Path) -> None:
    with serving(daemon.socket, tmp_path, http_read_token_file=str(tmp_path / "token")) as web:
        page = browser.page()
        page.open(web.url)
        assert eventually(lambda: page.run("document.activeElement?.id") == "token")
        page.call("Input.insertText", text="0123456789abcdef")
        page.press("Tab")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
        assert eventually(lambda: page.text("#state") == "up")
