"""Makes ``docs/dashboard.png``: ``python -m tests.web.picture [MINUTES]``.

It is the dashboard in Chromium, of a daemon with a disk tier that two real vLLM engines use: they
answer questions of two tenants about documents that fit neither into their own caches nor into L1.
The model is the pretrained one of ``make setup``. The words of the page stand in the file of the
picture, and ``test_dashboard.py`` compares them with those of today's page.
"""

from __future__ import annotations

import base64
import json
import random
import re
import struct
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench.web import web
from kvass.testing.daemon import running_daemon
from tests.support.browser import Page, running_browser
from tests.support.real_model import FOLDER
from tests.support.vllm.process import EngineProcess, Prompt
from tests.support.waiting import eventually

PICTURE: Final = Path(__file__).parents[2] / "docs" / "dashboard.png"
ENGINE: Final = {"dtype": "bfloat16", "max_model_len": 2048, "num_gpu_blocks_override": 96}
QUOTAS: Final = ["team-a=48MiB:16MiB", "team-b=:16MiB"]
DOCUMENTS: Final = 16
DOCUMENT_TOKENS: Final = 600
QUESTION_TOKENS: Final = 60
MINUTES: Final = 12.0
WIDTH: Final = 1100
WORDS: Final = """[...document.querySelectorAll('main :is(h2, h3, figcaption, th, .card span)')]
  .filter(each => each.offsetParent).map(each => each.textContent)"""
"""The page's headings and labels, but for those that are hidden."""
_FIGURE: Final = re.compile(r"\d[\d.,]*( ?[KMGT]?i?B\b)?")
_TEXT: Final = b"tEXt"
_END: Final = b"\0\0\0\0IEND"


def words(page: Page) -> list[str]:
    """What the page says beside figures."""
    return sorted({_FIGURE.sub("N", text) for text in page.run(WORDS)} - {""})


def picture(page: Page) -> bytes:
    """All of the page as a PNG, with its ``words``."""
    height = page.run("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    shot = page.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    body = _TEXT + b"words\0" + json.dumps(words(page)).encode()
    chunk = struct.pack(">I", len(body) - len(_TEXT)) + body + struct.pack(">I", zlib.crc32(body))
    head, end, rest = base64.b64decode(shot["data"]).partition(_END)
    return head + chunk + end + rest


def words_of(png: bytes) -> list[str]:
    """The ``words`` that ``picture`` wrote."""
    found: list[str] = json.loads(png.partition(_TEXT + b"words\0")[2].partition(b"]")[0] + b"]")
    return found


def use(engines: list[EngineProcess], vocabulary: int, minutes: float) -> None:
    """Ask the engines for so long: a document that is asked for often, or one that is not."""
    drawn = random.Random(7)

    def text(tokens: int) -> list[int]:
        return [drawn.randrange(4, vocabulary) for _ in range(tokens)]

    documents = [text(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    often = [1 / (place + 1) for place in range(DOCUMENTS)]
    until_s = time.monotonic() + 60 * minutes
    while time.monotonic() < until_s:
        for engine in engines:
            (place,) = drawn.choices(range(DOCUMENTS), often)
            tenant = {"kvass.tenant": "team-b" if place % 3 else "team-a"}
            asked = documents[place] + text(QUESTION_TOKENS)
            engine.submit(Prompt(asked, 16, params=tenant))
        for engine in engines:
            engine.answers()


def make(minutes: float, model: Path = FOLDER) -> bytes:
    """The picture of the dashboard after so many minutes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvass-picture-")))
        for name in ("disk", model.name):
            (folder / name).mkdir(mode=0o700)
        for file in model.iterdir():  # the page shows the folder's name
            (folder / model.name / file.name).symlink_to(file.resolve())
        tier = f"disk:{folder}/disk?capacity=2GiB"
        daemon = stack.enter_context(running_daemon(folder, "128MiB", tier=[tier], quota=QUOTAS))
        _, url = stack.enter_context(web(daemon.socket))
        engines = [
            stack.enter_context(
                EngineProcess(
                    folder / model.name,
                    folder / f"{name}.log",
                    socket=Path(daemon.socket),
                    args=ENGINE,
                )
            )
            for name in "ab"
        ]
        config = json.loads((model / "config.json").read_text())
        use([engine.wait_ready() for engine in engines], config["vocab_size"], minutes)
        browser = stack.enter_context(running_browser(folder))
        page = browser.page(WIDTH)
        page.open(url)
        assert eventually(lambda: page.text("#clock") != "")
        return picture(page)


if __name__ == "__main__":
    PICTURE.write_bytes(make(float(sys.argv[1]) if sys.argv[1:] else MINUTES))
