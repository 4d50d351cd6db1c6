"""The exceptions of this package.

    WorkerError
    |-- SettingsError      a setting that cannot work; names it
    |-- DeviceLostError    the GPU can't be used by this process any more
    `-- RedisSetupError    the Redis behind the URL can't be used

`worker.model.errors.ModelError` is about checkpoints.
"""


class WorkerError(Exception):
    """A worker cannot go on; the message is one clear line."""


class SettingsError(WorkerError):
    """A setting that cannot work."""


class RedisSetupError(WorkerError):
    """Redis is unreachable at start, or configured so that it would lose jobs."""


class DeviceLostError(WorkerError):
    """A GPU failed in a way after which nothing that this process asks of it succeeds: another process may fare better."""
