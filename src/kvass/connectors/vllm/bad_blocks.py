"""What vLLM's scheduler does when a load inside a step has failed.

A file of vLLM's version (see ``adapt.py``).

vLLM counts the tokens of the failed blocks as not computed, and drops the step's output of the
requests that have these blocks. That is not enough. With asynchronous scheduling or pipeline stages
later steps are scheduled already, and their output comes from the same blocks. The blocks are
cached from the step's beginning on, so other requests may get them before they are computed again.
And a request that was preempted or aborted meanwhile is not looked at.

Law of this file: no output and no cached block of vLLM comes from a load that failed.

- All requests that run with such a block, or with one that was computed from it, are preempted.
  They are computed from their first token on, and what is in flight of them is dropped.
- What is in flight of requests that are preempted already is dropped: nobody knows their blocks.
- Loads of requests that have such blocks fail.
- vLLM's own prefix cache forgets all blocks: a request that has ended may have left some.

Facts relied on:

- vLLM takes in the reports of a step before its output, and the steps in their order.
- A request that is preempted with ``drop_stale_output`` gets no output of a step that was scheduled
  before. Its blocks are not reused before these steps have ended.
- A block without a hash is no part of the prefix cache.
- With one KV cache group a request has one list of blocks, in the order of its tokens.
"""

from __future__ import annotations

import time
from typing import Any, Final

from vllm.v1.request import RequestStatus

ALL: Final = 0
"""The null block, as a failed block, stands for all blocks."""


def take_back(scheduler: Any, failed: set[int]) -> int:
    """Take back what was computed with the blocks ``failed``. Returns how many requests are
    preempted."""
    manager = scheduler.kv_cache_manager
    blocks = manager.block_pool.blocks
    bad = {block.block_id for block in blocks} if ALL in failed else set(failed)
    tables = {
        name: manager.get_block_ids(name)[0]
        for name, request in scheduler.requests.items()
        if request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
    }
    names = _with_bad_blocks(tables, bad)
    waiting = set()
    for name, request in scheduler.requests.items():
        if request.status is RequestStatus.PREEMPTED and request.num_stale_output_tokens:
            request.drop_stale_output = True
        elif name in names and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            waiting.add(name)
    scheduler._handle_failed_recving(waiting)
    now_s, affected = time.monotonic(), [r for r in scheduler.running if r.request_id in names]
    for request in reversed(affected):  # each becomes the first one that waits
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    manager.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})
    return len(affected)


def _with_bad_blocks(tables: dict[str, list[int]], bad: set[int]) -> set[str]:
    """The requests of ``tables`` with a block of ``bad``. All later blocks of such a request are
    bad, too."""
    names = set[str]()
    found = True
    while found:
        found = False
        for name, table in tables.items():
            if name not in names and not bad.isdisjoint(table):
                first = next(at for at, block in enumerate(table) if block in bad)
                bad.update(table[first:])
                names.add(name)
                found = True
    return names
