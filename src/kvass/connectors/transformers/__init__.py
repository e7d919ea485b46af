"""kvass in Hugging Face transformers: prompts whose beginning was computed before are not computed
again, in any process on this machine.

::

    kv = kvass.connectors.transformers.connect(model)
    output = kv.generate(input_ids, max_new_tokens=64)
"""

from kvass.connectors.transformers.connector import CachedModel, connect

__all__ = ["CachedModel", "connect"]
