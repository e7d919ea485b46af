"""Loads from tiers and stores to tiers.

A row that a tier reads or writes stays where it is until that tier is done with it.
"""
