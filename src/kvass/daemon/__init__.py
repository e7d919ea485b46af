"""The daemon around the core: sockets, memory, time and the tiers' processes. It decides nothing
about the cache."""
