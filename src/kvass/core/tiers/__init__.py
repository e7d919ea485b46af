"""Loads from tiers and stores to tiers.

A row that a tier reads or writes keeps its slot until that tier is done with it (law 3).
"""
