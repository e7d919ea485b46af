"""``kvass simulate``: computes the hit rate of other cache sizes for a recorded workload.

``traces`` reads requests. ``player`` plays them through the core that the daemon runs
(``core.machine.CacheMachine``); there is no second implementation. ``optimal`` computes the best
hit rate that an eviction policy can have. ``report`` prints. There are no KV bytes here: an arena
is only a size.
"""
