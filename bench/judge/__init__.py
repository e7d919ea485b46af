"""kvass and its peers by benchmarks that others wrote: ``make judge``.

From the root of the repository:

    make judge                     everything; .cache/judge/judge.md, .json, and the logs
    make judge SHORT=1             one round: does each row come?
    make judge ONLY=random         some workloads; ROUNDS=5
    make judge ONLY=chats          answers of the pretrained model, with drafts
    make judge PAGE=docs/judge.md  writes the page there too
    python -m bench.judge --render .cache/judge/judge.json   the page again, of that run

It starts a vLLM server for each contender: without a cache beside it, with vLLM's own offloading,
with LMCache and with kvass. vLLM's ``bench serve``, LMCache's ``bench engine`` and NVIDIA's AIPerf
ask them, one server at a time, in turns. All figures but the tokens found are read from the results
that these programs write, under their names.
"""
