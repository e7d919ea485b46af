"""Stands in for IPython, which SGLang imports and does not need."""  # noqa: N999
