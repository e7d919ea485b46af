"""The pure core: cache state and its rules. Events in, effects out; ``now`` is an argument (law 1)."""
