"""The pure core: cache state and its rules. Events in, effects out; time is an argument (law 1)."""
