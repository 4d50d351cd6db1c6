"""Structured logs: one JSON object a line, on standard error."""

import logging
import os
import sys

import structlog

from sluicegate.errors import CommandError

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


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
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[name]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
