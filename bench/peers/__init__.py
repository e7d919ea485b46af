"""kvass against LMCache, vLLM's own offloading, and vLLM alone: ``make bench-peers``.

From the root of the repository:

    make bench-peers                   everything; .cache/peers/benchmarks.md, .html and .json
    make bench-peers SHORT=1           few rounds and short prompts: does each row come?
    make bench-peers ONLY=copies,new   some parts; ROUNDS=5 REPETITIONS=1
    make bench-peers PAGE=docs/benchmarks.md   writes the page there too
    python -m bench.peers --render .cache/peers/benchmarks.json   the pages again, of that run

It installs LMCache once, into .cache/lmcache (``requirements/peers.sh``). Parts: those of
``engineless.PARTS`` and ``engines.ENGINE_PARTS``, and ``short`` (``bench.peers.short``). A part
that fails has its reason in the table and stops no other.
"""
