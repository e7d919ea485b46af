"""How long a hit is. A hit is no longer than what every layer group has."""
