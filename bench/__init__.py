"""Developers' benchmarks: what ``kvass bench`` does not measure.

From the root of the repository, with what ``make setup`` installs:

    make bench-check                        kvass bench against bench/baseline.json
    make bench                              the daemon; some three minutes
    python -m bench                         the same; --json, --l1-size
    python -m bench --tier disk:/some/path  a tier behind a daemon; also redis:, s3:, gcs:, azure:,
                                            mooncake:, each on a server that runs, and alone, too
    python -m bench.gpu_day                 all that only a GPU can tell, in order of worth; --smoke
                                            is a try on a CPU
    python -m bench --engine                real vLLM engines: time to the first token, with kvass
                                            and without
    python -m bench --sglang                real SGLang servers: a prompt that is found, with kvass
                                            and with SGLang's own storage backend "file"
    python -m bench --blend                 transformers: prompts of shuffled documents, with blend
                                            and without; prints the table of docs/blend.md
    python -m bench --engine --blend        the same of vLLM engines
    python -m bench.largest_messages        what the largest message of each kind costs the daemon
    python -m bench.big_machine             what requests of 8 engines of 8 ranks cost the daemon
    python -m bench.restart                 a daemon's first hit after a restart, with 1 M rows
    python -m bench.huge_pages              what pages of 2 MiB and 1 GiB are worth
    python -m bench.answers                 hits with answers in L1, and without
    python -m bench.agents                  the first token of agents after pauses, with fetches and
                                            without
    python -m bench.short_hits              hits of 32 to 2,048 tokens against computing
                                            them; --table in short, with two more figures
    python -m bench.waves                   16 hits at once, in engines with room for six
    python -m bench.nodes                   a hit of an engine on two machines, against one
    python -m bench.blend_quality           the worst case of blend; a small trained model

Each prints a table, or with ``--json`` one object. The exit status is 1 if any byte loaded differed
from what was stored. Nothing is left behind on a disk or a server.

What the names mean: those of ``--tier`` stand in ``bench.tiers``, those of ``--engine`` in
``bench.engine``, those of ``--sglang`` in ``bench.sglang``, those of ``--blend`` in ``bench.blend``
and ``bench.blend_engine``. Copies as DeepSeek-V3 makes them: ``kvass bench --model deepseek-v3``.
``python -m bench`` alone has:

- ``first_touch_gbps``: how fast the kernel hands out shared memory.
- ``lookup_128k_tp8_us``, ``release_128k_tp8_us``: as ``lookup_128k_us`` of ``kvass bench``, for
  eight ranks and rows of eight shards; eight sessions release, and all eight pings must have come
  back.
- ``coverage_3x512_us``: how far 512 chunks reach in three layer groups at once (full, a window, a
  state), once the rows are found: the arithmetic alone, in the bench's own process.
- ``segments_ms``: to find segments (``bench.segments``); ``segments_found``: whether exactly those
  that stand in the prompt were found.
- ``ping_rps``: empty round trips a second by 1 client, and by 16 that each wait for their own.
- ``page_get_vs_memcpy``, ``page_put_vs_memcpy``: a ``PageStore`` with 128 pages of 1 MiB
  (``bench.pages``); ``page_ms``: times of these. ``token_page_ms``: those of 128 pages of 16 KiB,
  one token each.
- ``longest_step_ms``: of the core with 1 TiB of 1 MiB rows, by what it is asked, in processor time;
  nobody else is answered meanwhile. It takes a minute.
- ``daemon_rss_mib``: VmRSS - RssShmem, so without the arena. ``daemon_idle_cpu_percent``: of a
  core.
"""
