"""The connector of Hugging Face transformers. A prompt's prefix that any process on this machine
has computed is loaded instead of computed.

::

    kv = kvass.connectors.transformers.connect(model)
    output = kv.generate(input_ids, max_new_tokens=64)
"""

from kvass.connectors.transformers.connector import CachedModel, connect

__all__ = ["CachedModel", "connect"]
