"""The two names of IPython that SGLang imports."""


def HTML(*_: object, **__: object) -> None:  # noqa: N802
    """Does nothing."""


def display(*_: object, **__: object) -> None:
    """Does nothing."""
