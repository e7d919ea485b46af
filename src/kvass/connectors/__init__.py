"""Connectors: one package per engine."""
