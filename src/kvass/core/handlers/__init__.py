"""The handlers of messages. A message that is refused changes nothing (law 11)."""
