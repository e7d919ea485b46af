"""Metrics, health checks, a dashboard and administration over HTTP.

Law of this package: it runs in a process of its own and is a client of the daemon like any other.
So a slow or stuck HTTP client takes no time of the daemon.
"""
