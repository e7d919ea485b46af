"""How bytes travel between a client and the daemon."""
