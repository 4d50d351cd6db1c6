"""The exception of this package."""


class ModelError(Exception):
    """A checkpoint can't be served. One clear line that names the file, and the tensor or field if there is one."""
