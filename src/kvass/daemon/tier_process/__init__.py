"""The process of a tier: the daemon's end (``supervisor``) and what runs in it (``server``)."""
