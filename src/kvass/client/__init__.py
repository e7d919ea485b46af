"""The client: what an engine, or a command line, holds of the daemon. No torch."""
