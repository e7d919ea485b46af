"""What tests of kvass, and of things built on it, stand on. Nothing shipped imports it."""
