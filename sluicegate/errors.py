"""The command's own failures."""


class CommandError(Exception):
    """Something that the user can understand and mend: printed as one line, exit code 1."""
