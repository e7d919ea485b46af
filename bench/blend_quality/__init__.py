"""The worst case of blend: a small model, a task whose answers need two documents, a table.

From the root of the repository:

    python -m bench.blend_quality           prints that table of docs/blend.md; five minutes
    python -m bench.blend_quality --train   trains the model again first, from its seed

``task`` says what is asked, ``quality`` how KV is reused and scored, ``first_token`` what it takes.
There is no table unless the model answers nearly everything after a full prefill, and clearly less
without recompute.
"""
