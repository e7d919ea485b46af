"""What outlives the daemon: the index of L1 in memory that the next daemon adopts.

``index_file`` has the parts of that memory, ``directory`` the log of namespaces and extent sets,
``processes`` those that may still write, and ``seals`` the checksum of a row. ``core/adoption.py``
reads it all at the start of the next life.
"""
