"""An engine: ``python -m tests.support.stored_rows SOCKET [store]`` stores 12 rows, if told to,
looks all of them up, and prints how many there are, each as it was stored."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Final

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH

KEYS: Final = [bytes([number]) * WIDTH for number in range(12)]
ROW_BYTES: Final = 64 << 10


def main(socket: str, store: bool) -> None:
    with ExitStack() as ending:
        rows = Rows(socket, "mine", ROW_BYTES, ending)
        if store:
            rows.store(KEYS)
        matched = rows.find(KEYS)
        assert not matched.chunks or rows.holds(matched, KEYS[: matched.chunks])
        sys.stdout.write(f"{matched.chunks}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] == ["store"])
