"""zstd, of Python's own library (3.14) or of the package ``zstandard``. Releases the GIL.

The parameters are those for bytes of which each is a symbol and hardly anything repeats: Huffman
codes alone, as it were. A search for repetitions (level 1) takes three times as long, and finds
some that cost more than they save.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from kvass.tiers.base import Buffer

_WINDOW_LOG: Final = 17
_MIN_MATCH: Final = 7
_HASH_LOG: Final = 6

try:
    from compression import zstd as _own
except ImportError:
    import zstandard

    class _Memory(threading.local):
        """What each thread compresses and decompresses with."""

        def __init__(self) -> None:
            self.compressor = zstandard.ZstdCompressor(
                compression_params=zstandard.ZstdCompressionParameters(
                    strategy=zstandard.STRATEGY_FAST,
                    min_match=_MIN_MATCH,
                    hash_log=_HASH_LOG,
                    window_log=_WINDOW_LOG,
                )
            )
            self.decompressor = zstandard.ZstdDecompressor()

    _memory = _Memory()

    def compressed(plain: Buffer) -> bytes:
        """Return a frame with these bytes."""
        return _memory.compressor.compress(plain.data)

    def decompressed(frame: Buffer, size: int) -> bytes | None:
        """Return the ``size`` bytes of a frame. None if it is damaged or has any other number. No
        more memory is used, whatever the frame says."""
        try:
            if zstandard.frame_content_size(frame.data) not in (-1, size):
                return None
            plain = _memory.decompressor.decompress(frame.data, max_output_size=size)
        except zstandard.ZstdError:
            return None
        return plain if len(plain) == size else None

else:
    _OPTIONS: Final[dict[Any, int]] = {
        _own.CompressionParameter.strategy: _own.Strategy.fast,
        _own.CompressionParameter.min_match: _MIN_MATCH,
        _own.CompressionParameter.hash_log: _HASH_LOG,
        _own.CompressionParameter.window_log: _WINDOW_LOG,
    }
    _LIMITS: Final[dict[Any, int]] = {_own.DecompressionParameter.window_log_max: _WINDOW_LOG}

    def compressed(plain: Buffer) -> bytes:
        """Return a frame with these bytes."""
        frame: bytes = _own.compress(plain.data, options=_OPTIONS)
        return frame

    def decompressed(frame: Buffer, size: int) -> bytes | None:
        """As above."""
        decompressor = _own.ZstdDecompressor(options=_LIMITS)
        try:
            plain: bytes = decompressor.decompress(frame.data, max_length=size + 1)
        except _own.ZstdError:
            return None
        return plain if len(plain) == size and decompressor.eof else None
