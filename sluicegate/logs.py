"""Structured logs: one JSON object a line, on standard error."""

import logging
import os
import sys
import traceback
from typing import Any

import structlog
from structlog.typing import EventDict

from sluicegate.errors import CommandError

MAX_FRAMES = 20
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def _frames_alone(_: Any, __: str, event: EventDict) -> EventDict:
    """An exception's type and where it came from. Its text is left out: it may quote a prompt or a key."""
    info = event.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info[1] if isinstance(info, tuple) else info
    if isinstance(error, BaseException):
        frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
        event["exception"] = type(error).__name__
        event["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return event


def configure(process: str) -> None:
    """Set up logging for this process; SLUICEGATE_LOG_LEVEL is debug, info (default), warning or error."""
    name = os.environ.get("SLUICEGATE_LOG_LEVEL", "info").lower()
    if name not in _LEVELS:
        raise CommandError(f"SLUICEGATE_LOG_LEVEL: expected one of {', '.join(_LEVELS)}, got {name[:20]!r}")
    # Libraries' own logs may hold what they work on; only their warnings are wanted.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _frames_alone,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
