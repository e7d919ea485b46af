"""The daemon's clients: the connection to it, and the calls of engines and commands. No torch."""
