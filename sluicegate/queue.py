"""`sluicegate queue`: what waits and what runs, and the jobs that were given up."""

import asyncio
import secrets
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from protocol.errors import DecodeError, ProtocolError
from protocol.ids import GatewayId, ModelName, parse_model_name
from protocol.job import Job
from protocol.key_space import KeySpace
from protocol.queue_scripts import CANCEL
from protocol.replies import Done, Failed, Reply, decode_replies
from protocol.scripts import LIVE_MODELS, LIVE_WORKERS, OPEN_REPLIES
from protocol.signing import open_job, seal_job
from protocol.submit_script import SUBMIT
from sluicegate.environment import data_folder, redis_url
from sluicegate.errors import CommandError
from sluicegate.redis_client import run_connected
from sluicegate.secrets import derived_keys

REPLIES_TTL_MS = 30_000
_STATES = {"W": "waiting", "L": "running", "H": "handed over", "R": "returned"}


@dataclass(frozen=True, slots=True)
class _Queue:
    """One installation's Redis, and the key that its jobs are signed with."""

    client: Any
    keys: KeySpace
    signing_key: bytes = field(repr=False)

    async def models(self, wanted: str | None) -> list[ModelName]:
        """The model that was named, or all that are served or have dead jobs."""
        if wanted is not None:
            return [parse_model_name(wanted)]
        names = {raw.decode() for raw in await self.client.eval(LIVE_MODELS, 1, self.keys.models)}
        async for raw in self.client.scan_iter(self.keys.dead(ModelName("*")), count=1000):
            names.add(raw.decode().partition("{")[2].partition("}")[0])
        return [ModelName(name) for name in sorted(names)]


def _with_queue(arguments: Namespace, work: Callable[[_Queue], Awaitable[None]]) -> None:
    data = data_folder(arguments.data)
    url = redis_url(arguments.redis_url, data)
    signing_key = derived_keys(data).job_signing

    try:
        run_connected(url, lambda client: work(_Queue(client, KeySpace(), signing_key)))
    except ProtocolError as error:
        raise CommandError(str(error)) from None


def inspect(arguments: Namespace) -> None:
    """Lines with what waits in them, jobs that run, and the dead."""

    async def work(queue: _Queue) -> None:
        for model in await queue.models(arguments.model):
            await _inspect(queue, model)

    _with_queue(arguments, work)


async def _inspect(queue: _Queue, model: ModelName) -> None:
    keys, client = queue.keys.queue(model), queue.client
    load = {name.decode(): int(count) for name, count in (await client.hgetall(keys.load)).items()}
    fair = {name.decode(): value.decode() for name, value in (await client.hgetall(keys.fair)).items()}
    records = [raw.decode().split("|") for raw in (await client.hgetall(keys.live)).values()]
    workers = await client.eval(LIVE_WORKERS, 1, queue.keys.workers(model))
    print(
        f"{model}: {len(workers)} {'worker' if len(workers) == 1 else 'workers'}, {load.get('n', 0)} jobs wait ({load.get('t', 0)} weighted tokens), "
        f"{sum(record[0] == 'L' for record in records)} run"
    )
    lines = sorted({record[4] for record in records})
    if lines:
        print(f"  {'LINE':<40} {'STATES':<40} {'WEIGHT':>7} {'VIRTUAL TIME':>13}")
    for line in lines:
        states = [record[0] for record in records if record[4] == line]
        told = ", ".join(f"{states.count(code)} {name}" for code, name in _STATES.items() if code in states)
        tenant = line.partition("/")[2]
        virtual = int(fair.get(f"v:{tenant}", 0)) // 1000
        print(f"  {line:<40} {told:<40} {float(fair.get(f'w:{tenant}', 1)):>7g} {virtual:>13}")
    dead = await client.xrange(queue.keys.dead(model))
    if dead:
        print(f"  {'DEAD':<18} {'GIVEN UP (UTC)':<17} {'REASON':<12} {'DELIVERIES':>10}  {'LINE':<30} REQUEST")
    for entry_id, fields in dead:
        facts = {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items() if name != b"job"}
        print(
            f"  {entry_id.decode():<18} {_minute(entry_id):<17} {facts.get('reason', '?'):<12} "
            f"{facts.get('deliveries', '?'):>10}  {facts.get('line', '?'):<30} {facts.get('id', '?')}"
        )


def purge(arguments: Namespace) -> None:
    """Forget dead jobs: one, or all of a model."""

    async def work(queue: _Queue) -> None:
        count = 0
        for model in await queue.models(arguments.model):
            key = queue.keys.dead(model)
            if arguments.dead_id is not None:
                count += await queue.client.xdel(key, arguments.dead_id)
            else:
                count += await queue.client.xlen(key)
            if arguments.dead_id is None or not await queue.client.xlen(key):
                await queue.client.delete(key)
        print(f"Removed {count} dead {'job' if count == 1 else 'jobs'}.")

    _with_queue(arguments, work)


def requeue(arguments: Namespace) -> None:
    """Run a dead job again and tell how it ends. Its client has long had its answer, an error: this one goes to nobody."""

    async def work(queue: _Queue) -> None:
        for model in await queue.models(arguments.model):
            found = await queue.client.xrange(queue.keys.dead(model), arguments.dead_id, arguments.dead_id)
            if found:
                entry_id, fields = found[0]
                await _requeue(queue, model, entry_id, fields, arguments.timeout)
                return
        raise CommandError(f"there is no dead job {arguments.dead_id!r}; see: sluicegate queue inspect")

    _with_queue(arguments, work)


async def _requeue(
    queue: _Queue, model: ModelName, entry_id: bytes, fields: dict[bytes, bytes], timeout_s: float
) -> None:
    try:
        job = open_job(queue.signing_key, fields.get(b"job", b""))
    except ProtocolError as error:
        raise CommandError(f"the job can't be run: {error}") from None
    gateway_id = GatewayId("requeue-" + secrets.token_hex(8))
    now_ms = int(datetime.now(timezone.utc).timestamp() * 1000)
    again = replace(
        job, gateway_id=gateway_id, attempt=1, progress=None, created_ms=now_ms, deadline_ms=now_ms + int(timeout_s * 1000),
    )  # fmt: skip
    replies = queue.keys.replies(model, gateway_id)
    await queue.client.eval(OPEN_REPLIES, 1, replies, int(timeout_s * 1000) + REPLIES_TTL_MS)
    try:
        await _submit(queue, again)
        end = await _end_of(queue, again, replies, timeout_s)
    finally:
        keys = [*_keys(queue, again), queue.keys.cancels(model)]
        await queue.client.eval(CANCEL.text, len(keys), *keys, again.request_id)
        await queue.client.delete(replies)
    if not isinstance(end, Done):
        told = "it did not end in time" if end is None else f"{end.code}: {end.message}"
        raise CommandError(f"the job failed again: {told}")
    await queue.client.xdel(queue.keys.dead(model), entry_id)
    print(f"The job ended well: {end.prompt_tokens} prompt tokens, {end.completion_tokens} generated.")


async def _submit(queue: _Queue, job: Job) -> None:
    keys = [*_keys(queue, job), queue.keys.workers(job.model)]
    most = 1 << 50
    result = await queue.client.eval(
        SUBMIT.text, len(keys), *keys, job.request_id, seal_job(queue.signing_key, job), job.line, job.gateway_id,
        job.attempt, len(job.prompt_token_ids), job.max_output_tokens, 1.0, most, most, most, most, 0,
    )  # fmt: skip
    if result[0] == b"no_worker":
        raise CommandError(f"no worker serves {job.model}")


def _keys(queue: _Queue, job: Job) -> list[str]:
    return [*queue.keys.queue(job.model).all(), queue.keys.line(job.model, job.line)]


async def _end_of(queue: _Queue, job: Job, replies: str, timeout_s: float) -> Done | Failed | None:
    """The last word on a job, None if there's none in time. Polled: this is a tool for a person."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while loop.time() < end_s:
        for _, fields in await queue.client.xrange(replies):
            for reply in _replies(fields):
                if isinstance(reply, (Done, Failed)):
                    return reply
        await asyncio.sleep(0.1)
    return None


def _replies(fields: dict[bytes, bytes]) -> list[Reply]:
    try:
        return [envelope.reply for payload in fields.values() for envelope in decode_replies(payload)]
    except DecodeError:
        return []


def _minute(entry_id: bytes) -> str:
    milliseconds = int(entry_id.partition(b"-")[0])
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M")
