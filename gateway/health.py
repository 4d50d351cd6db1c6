"""Liveness (this process runs), readiness (it can serve), metrics, and the operator's view of the workers."""

import time
from dataclasses import asdict

from aiohttp import web

from gateway.errors import ApiError
from gateway.metrics import Moment
from gateway.parts import PARTS, Parts

# A round of the directory looks at Redis and at all waiting requests; it takes seconds at most even if Redis doesn't answer.
STALL_S = 30.0


async def live(request: web.Request) -> web.Response:
    """200 while this process makes progress, else 503: a restart would help. That Redis or the workers are away is no reason for one."""
    parts = request.app[PARTS]
    stalled_s = time.monotonic() - parts.directory.last_round_s
    ended = [task for task in parts.tasks if task.done()]
    if stalled_s > STALL_S or ended:
        reason = "a part of the gateway has ended" if ended else f"no progress for {stalled_s:.0f} seconds"
        return web.json_response({"status": "stalled", "reason": reason}, status=503)
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 if a request sent now would be served, else 503 with the reason."""
    reason = _unready_reason(request.app[PARTS])
    if reason is not None:
        return web.json_response({"status": "not ready", "reason": reason}, status=503)
    return web.json_response({"status": "ready"})


def _unready_reason(parts: Parts) -> str | None:
    if parts.is_draining:
        return "shutting down"
    if not parts.link.is_up or not parts.reader.is_open:
        return "redis does not answer"
    if parts.directory.fleet.num_serving == 0:
        return "no worker is up"
    return None


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text format, for the operator: sums over tenants tell one of them what the others do."""
    await request.app[PARTS].auth.admin(request)
    return await open_metrics(request)


async def open_metrics(request: web.Request) -> web.Response:
    """The same without a key, on a port that only the operator reaches. The workers' numbers are those of this moment."""
    parts = request.app[PARTS]
    try:
        await parts.directory.refresh()
    except ApiError:
        pass  # what this process knows by itself is worth telling all the same
    generations = parts.generations
    moment = Moment(
        parts.directory.fleet, parts.link.is_up, generations.num_open, generations.moments(), parts.intake.num_free,
        parts.bodies.num_bytes,
    )  # fmt: skip
    text = parts.metrics.render(moment)
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def workers(request: web.Request) -> web.Response:
    """For the operator: every live worker's status."""
    parts = request.app[PARTS]
    await parts.auth.admin(request)
    await parts.directory.refresh()
    statuses = [asdict(status) for found in parts.directory.fleet.statuses.values() for status in found]
    return web.json_response({"object": "list", "data": statuses})
