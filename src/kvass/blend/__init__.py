"""Blend: reuse of cached chunks that are not a prefix (docs/blend.md).

A *segment* is a run of cached chunks found in a prompt. Its K is moved to its new positions, and
some of its tokens are computed again, because it was stored without what now stands before it.
"""
