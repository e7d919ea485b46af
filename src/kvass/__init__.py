"""kvass: KV cache as a shared service."""

from kvass._version import __version__

__all__ = ["__version__"]
