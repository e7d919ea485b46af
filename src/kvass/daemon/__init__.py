"""The shell around the core: sockets, memory and time. It decides nothing about the cache."""
