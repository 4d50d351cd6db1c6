"""The one exception of this package."""


class KernelError(ValueError):
    """An op was asked for something that it doesn't do; the message names op and argument."""
