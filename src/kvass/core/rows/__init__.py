"""Rows: their states and indexes, the allocation of their slots, and their eviction.

A row changes its state only along its transitions. Rows are evicted only when a new row needs the
room (law 6).
"""
