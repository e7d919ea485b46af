"""The length of a hit. A hit is no longer than what every layer group has."""
