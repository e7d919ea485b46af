"""Rows and their room.

A row changes its state only along its transitions, and room is made only where a new row needs it
(law 6).
"""
