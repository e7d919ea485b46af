"""Metrics, health checks, a dashboard and administration over HTTP.

Law of this package: it runs in a process of its own and is an ordinary client of the daemon. So a
slow HTTP client takes no time of the daemon.
"""
