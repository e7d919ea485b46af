"""What the connector of any engine needs, and nothing that is known of one engine only.

Naming weights by content (``weights.py``, ``adapters.py``), describing settings (``identity.py``),
and turning each defect into a miss (``boundary.py``).
"""
