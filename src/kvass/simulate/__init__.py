"""``kvass simulate``: computes the hit rate of other cache sizes for a recorded workload.

``traces`` reads requests, ``player`` plays them through the core that the daemon runs
(``core.machine.CacheMachine``; there is no second implementation), ``optimal`` computes what no
policy can beat, ``report`` prints. Nothing here reads or writes KV: an arena is a number.
"""
