"""The process of a tier. ``supervisor`` runs in the daemon, ``server`` in the tier's process."""
