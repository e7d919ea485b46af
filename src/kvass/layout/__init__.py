"""Where KV bytes lie (planes), and which of them to copy (copy plans). It is pure: it needs no
engine, and touches no memory."""
