"""What each message does. A message that is refused changes nothing."""
