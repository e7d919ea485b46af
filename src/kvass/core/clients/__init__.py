"""The clients of the core: connections, instances and tenants.

An instance whose ranks contradict each other gets no namespace. No user can take all connections.
"""
