"""Log lines are JSON, and an exception in them is its type and its place."""

import json
import subprocess
import sys

CODE = """
import structlog
from sluicegate.logs import configure
configure("test")
log = structlog.get_logger()
def fails():
    raise KeyError("CANARYPROMPT")
try:
    fails()
except KeyError as error:
    log.exception("it_crashed", tenant="acme")
    log.error("again", exc_info=error)
log.info("fine", exc_info=None)
"""


def test_an_exceptions_text_is_not_logged() -> None:
    """It may quote a prompt or a key; type, file, line and function are enough to find the fault."""
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    first, second, third = (json.loads(line) for line in result.stderr.splitlines())
    assert "CANARYPROMPT" not in result.stderr
    for line in (first, second):
        assert ("KeyError", "error", "test") == (line["exception"], line["level"], line["process"])
        assert line["frames"][-1].endswith(":7 fails")
    assert "exception" not in third
