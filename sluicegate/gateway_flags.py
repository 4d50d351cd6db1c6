"""The limits of a gateway as flags: one row for each, with the default that the gateway itself has."""

import argparse
import dataclasses
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from gateway.settings import GatewaySettings
from sluicegate.argument_types import some_seconds, whole

_MANY = 1 << 20

# (field of GatewaySettings, flag, type, help)
LIMITS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("max_body_bytes", "--max-body-bytes", whole(1024, 1 << 30), "largest request body"),
    ("max_buffered_bytes", "--max-buffered-bytes", whole(2048, 1 << 40),
     "bodies in memory, all together; one tenant gets half"),
    ("max_connections", "--max-connections", whole(1, _MANY), "open connections; idle ones give way to new ones"),
    ("max_waiting_jobs", "--max-waiting-jobs", whole(1, _MANY), "longest queue of a model"),
    ("max_waiting_tokens", "--max-waiting-tokens", whole(1, 1 << 40), "the same in expected tokens"),
    ("max_tenant_jobs", "--max-tenant-jobs", whole(1, _MANY), "longest line of a tenant for a model"),
    ("max_tenant_tokens", "--max-tenant-tokens", whole(1, 1 << 40), "the same in expected tokens"),
    ("max_choices", "--max-choices", whole(1, 1024), "largest n"),
    ("max_prompts", "--max-prompts", whole(1, 4096), "most prompts in one text completion"),
    ("head_timeout_s", "--head-timeout", some_seconds, "time for a request's line and headers to arrive"),
    ("body_timeout_s", "--body-timeout", some_seconds, "time for a request's body to arrive"),
    ("idle_timeout_s", "--idle-timeout", some_seconds, "time that a connection may stay open without a request"),
    ("slow_reader_s", "--slow-reader", some_seconds, "time for a client to take what was sent to it"),
    ("keep_alive_s", "--keep-alive", some_seconds, "silence of a stream before a comment is sent"),
    ("request_timeout_s", "--request-timeout", some_seconds, "time for an answer if the client sets none"),
    ("max_request_timeout_s", "--max-request-timeout", some_seconds, "longest time that a client may set"),
    ("lease_s", "--account-lease", some_seconds, "after which what a dead gateway's requests held is free again"),
    ("usage_rows_days", "--usage-rows-days", whole(1, 3660), "days that usage rows are kept"),
    ("intake_processes", "--intake-processes", whole(1, 256), "processes that check and tokenize requests"),
    ("intake_timeout_s", "--intake-timeout", some_seconds, "time for one request to be checked and tokenized"),
    ("intake_wait_s", "--intake-wait", some_seconds, "time that a request waits for a free intake process"),
)  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add all flags."""
    defaults = {field.name: field.default for field in dataclasses.fields(GatewaySettings)}
    for name, flag, kind, text in LIMITS:
        metavar = "SECONDS" if name.endswith("_s") else "N"
        parser.add_argument(flag, dest=name, type=kind, metavar=metavar, default=defaults[name], help=text)
    parser.add_argument(
        "--metrics-port", type=whole(0, 65535), metavar="P",
        help="serve /metrics and /health here too, without a key (default: /metrics on the main port, with an admin key)",
    )  # fmt: skip
    parser.add_argument(
        "--routing", choices=("on", "off"), default="on",
        help="send jobs to workers that hold their prefix or session; off: to whichever asks first",
    )  # fmt: skip
    parser.add_argument("--metrics-host", metavar="HOST", default="127.0.0.1", help="address for --metrics-port")


def limits(arguments: Namespace) -> dict[str, Any]:
    """The fields of GatewaySettings that the flags set."""
    return {name: getattr(arguments, name) for name, *_ in LIMITS}
