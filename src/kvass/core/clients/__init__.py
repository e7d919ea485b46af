"""Who asks: sessions, instances and tenants.

An instance whose ranks contradict each other gets no namespace, and no user can take all places.
"""
