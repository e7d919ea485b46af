"""Movers: they carry out copy plans between engine memory and arena slots."""
