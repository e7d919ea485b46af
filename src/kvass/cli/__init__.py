"""The ``kvass`` command."""
