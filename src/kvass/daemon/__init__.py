"""The daemon: runs the core, and does its I/O. It makes no decisions about the cache."""
