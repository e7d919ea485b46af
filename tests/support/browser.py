"""Headless Chromium, told what to do through its DevTools pipe (no package, no port).

``requirements/debian.sh`` installs it into the virtual environment.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

DEBIAN: Final = Path(sys.prefix) / "debian"
_FLAGS: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-pipe", "about:blank"),
)
_FONTS: Final = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{folder}</cachedir></fontconfig>"""


def debian(name: str) -> Path:
    """A program of ``requirements/debian.sh``. Raises ``AssertionError`` if it is not there."""
    program = DEBIAN / "bin" / name
    assert program.exists(), f"no {name}: bash requirements/debian.sh .venv says what it needs"
    return program


class Page:
    """One page; what it logs as an error, and what it throws, is in ``errors``."""

    def __init__(self, browser: Browser, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.errors: list[str] = []
        browser.pages[self._session] = self
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **metrics, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def call(self, method: str, **params: Any) -> Any:
        """What a DevTools method returns. Raises ``AssertionError`` for an error."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Begin to load it."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element says."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def told(self, method: str, params: dict[str, Any]) -> None:
        """An event of the page."""
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))


class Browser:
    """A process; messages are JSON, each ends with a zero byte."""

    def __init__(self, said: int, heard: int) -> None:
        self._out, self._in = os.fdopen(said, "wb", 0), os.fdopen(heard, "rb", 0)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.pages: dict[str, Page] = {}

    def page(self, width: int = 1100, height: int = 900, dark: bool = False) -> Page:
        """A new one."""
        return Page(self, width, height, dark)

    def call(self, method: str, session: str = "", /, **params: Any) -> Any:
        """What a DevTools method returns. Raises ``AssertionError`` for an error."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        self._out.write(json.dumps(message).encode() + b"\0")
        while (got := self._read()).get("id") != number:
            if got.get("sessionId") in self.pages:
                self.pages[got["sessionId"]].told(got["method"], got["params"])
        assert "error" not in got, (method, got)
        return got["result"]

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            more = self._in.read(1 << 20)
            assert more, "the browser ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        """It ends."""
        self._out.close()
        self._in.close()


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """Its files are in ``folder``. Raises ``AssertionError`` if there is none."""
    program = debian("chromium-headless-shell")
    fonts = folder / "fonts.conf"
    fonts.write_text(_FONTS.format(fonts=DEBIAN / "fonts", folder=folder))
    hear, said = os.pipe()
    heard, say = os.pipe()
    command = f'exec "$0" "$@" 3<&{hear} 4>&{say}'
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(DEBIAN / "lib"),
        "FONTCONFIG_FILE": str(fonts),
        "HOME": str(folder),
        "TZ": "UTC",
    }
    with subprocess.Popen(
        ["bash", "-c", command, program, f"--user-data-dir={folder}/profile", *_FLAGS],
        env=environment,
        pass_fds=(hear, say),
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(hear)
        os.close(say)
        browser = Browser(said, heard)
        try:
            yield browser
        finally:
            browser.close()
            process.terminate()
            process.wait(20)
