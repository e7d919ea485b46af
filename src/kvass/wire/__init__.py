"""Frames and sockets between a client and the daemon, and whether to trust the daemon."""
