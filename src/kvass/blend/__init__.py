"""Blend: reuse of cached chunks that are not a prefix (docs/blend.md).

A *segment* is a run of cached chunks found in a prompt. Its K is moved to its new positions. Some
of its tokens are computed again, because other tokens stood before it when it was stored.
"""
