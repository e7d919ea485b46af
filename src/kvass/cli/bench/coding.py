"""Measures how fast a core compresses the records of a tier: what ``compress=lossless`` brings."""

from __future__ import annotations

from kvass.tiers.rates import Rate


def measure_coding() -> dict[str, float]:
    """The figures; the package's docstring explains the names. None without a library for it."""
    try:
        from kvass.tiers.compressed import try_a_core
    except ImportError:
        return {}
    encodes, decodes = Rate(each=True), Rate(each=True)
    part = try_a_core(encodes, decodes)
    return {
        "compressed_part": part,
        "compress_gbps": (encodes.value() or 0.0) / 1e9,
        "decompress_gbps": (decodes.value() or 0.0) / 1e9,
    }
