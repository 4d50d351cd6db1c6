"""A gateway over a real Valkey, with a worker that does what a test tells it: it speaks the real protocol and has no model."""

import asyncio
import io
import json
import secrets
import string
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import ClientSession, web
from redis.asyncio import Redis

from gateway.app import create_runner, running_parts
from gateway.settings import GatewaySettings
from gateway.tenant_store import TenantStore
from protocol.codec import encode
from protocol.ids import ModelName, TenantId
from protocol.job import Job
from protocol.key_space import CANCEL_FIELD, KeySpace
from protocol.model_card import ModelCard, TokenizerSpec, WorkerStatus
from protocol.replies import Delta, Done, Failed, Reply, ReplyEnvelope, Started, encode_replies
from protocol.scripts import ANNOUNCE_MODEL, HEARTBEAT
from protocol.signing import open_job
from worker.job_queue import Holding, JobQueue, Outbound
from worker.redis_link import RedisLink

MODEL = ModelName("toy/model-1")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
ALPHABET = [*string.printable, *map(chr, range(0x100, 0x180))]


def toy_spec(template: str = TEMPLATE) -> TokenizerSpec:
    """A byte-level tokenizer in which every byte is a token, and three control tokens."""
    stand_ins, shifted = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            stand_ins.append(chr(byte))
        else:
            stand_ins.append(chr(256 + shifted))
            shifted += 1
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": {c: i for i, c in enumerate(stand_ins)}, "merges": []},
    }  # fmt: skip
    control = (("<|im_start|>", 256), ("<|im_end|>", 257), ("<|end|>", 258))
    return TokenizerSpec(json.dumps(document), control, template, None, False, (257,), 259)


@dataclass
class ScriptedWorker:
    """Takes jobs from the queue and answers each with `script(job)`; notes jobs and cancellations."""

    redis: Redis
    keys: KeySpace
    signing_key: bytes
    template: str = TEMPLATE
    script: Callable[[Job], list[Reply] | None] = lambda job: [Started("w1"), *words(job, "Hello ", "world"), done(job)]
    jobs: list[Job] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    is_alive: bool = True
    is_taking: bool = True
    sent: dict[str, int] = field(default_factory=dict)

    async def run(self) -> None:
        card = ModelCard(MODEL, "d" * 64, "toy", 1000, 1000, toy_spec(self.template), 1)
        raw = encode(card)
        self.queue = JobQueue(RedisLink(self.redis, self.redis, self.keys), MODEL, "w1", 60_000)
        await self.redis.set(self.keys.card(MODEL, "c1"), raw)
        await asyncio.gather(self._beat(), self._take(), self._watch())

    async def _beat(self) -> None:
        status = WorkerStatus("w1", MODEL, "c1", 10, 10, 0, 0, 0, 4)
        while True:
            if self.is_alive:
                keys = [self.keys.workers(MODEL), self.keys.worker(MODEL, "w1"), self.keys.card(MODEL, "c1")]
                await self.redis.eval(HEARTBEAT, 3, *keys, "w1", encode(status), 1500)
                await self.redis.eval(ANNOUNCE_MODEL, 1, self.keys.models, MODEL, 1500)
            await asyncio.sleep(0.1)

    async def _take(self) -> None:
        while True:
            while self.is_taking and (pulled := await self.queue.pull(0, 100)) is not None:
                job = open_job(self.signing_key, pulled.envelope)
                self.jobs.append(job)
                for reply in self.script(job) or []:
                    await self.reply(job, reply)
            await asyncio.sleep(0.01)

    async def reply(self, job: Job, reply: Reply, sequence: int | None = None) -> None:
        number = self.sent.get(job.request_id, 0) if sequence is None else sequence
        self.sent[job.request_id] = number + 1
        payload = encode_replies([ReplyEnvelope(job.request_id, job.attempt, number, reply)])
        holding = Holding(job.request_id, job.attempt, job.line)
        await self.queue.publish(job.gateway_id, [Outbound(holding, payload, isinstance(reply, (Done, Failed)))])

    async def _watch(self) -> None:
        last = b"0"
        while True:
            found = await self.redis.xrange(self.keys.cancels(MODEL), min=b"(" + last if last != b"0" else "-")
            for entry_id, fields in found:
                last = entry_id
                if CANCEL_FIELD in fields:
                    self.cancelled.append(fields[CANCEL_FIELD].decode())
            await asyncio.sleep(0.02)


def words(job: Job, *texts: str) -> list[Reply]:
    """Deltas for each sample, the last one finished."""
    replies: list[Reply] = []
    for index in range(job.n):
        for place, text in enumerate(texts):
            finish = "stop" if place == len(texts) - 1 else None
            replies.append(Delta(index, text, (1,), (), finish))
    return replies


def done(job: Job, tokens: int = 2) -> Done:
    return Done(len(job.prompt_token_ids), 0, tokens * job.n)


@dataclass
class Door:
    """A running gateway with its worker, and a client."""

    url: str
    key: str
    settings: GatewaySettings
    worker: ScriptedWorker
    session: ClientSession
    store: TenantStore
    redis: Redis
    parts: object

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def post(self, body: object, route: str = "/v1/chat/completions", **headers: str):
        """Status, parsed JSON (or text) and headers of a POST."""
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        if len(data) > 500_000:  # the client warns of large bodies that aren't streams
            data = io.BytesIO(data.encode() if isinstance(data, str) else data)
        sent = {"Content-Type": "application/json", **self.headers, **headers}
        async with self.session.post(self.url + route, data=data, headers=sent) as response:
            raw = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(raw) if is_json else raw, response.headers

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def open_door(url: str, template: str = TEMPLATE, **changes) -> AsyncIterator[Door]:
    prefix = "t" + secrets.token_hex(4)
    options = {
        "redis_url": url,
        "key_pepper": b"p" * 32,
        "job_signing_key": b"j" * 32,
        "key_prefix": prefix,
        "port": 0,
        "admin_key": "admin-key-of-tests",
        **changes,
    }
    settings = GatewaySettings(**options)
    client = Redis.from_url(url)
    keys = KeySpace(prefix)
    store = TenantStore(client, keys, settings.key_pepper)
    await store.create_tenant(TenantId("acme"), "Acme")
    key = (await store.create_key(TenantId("acme"), "test")).secret
    worker = ScriptedWorker(client, keys, settings.job_signing_key, template)
    running = asyncio.create_task(worker.run())
    async with running_parts(settings) as parts, ClientSession() as session:
        runner = create_runner(parts)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        door = Door(f"http://127.0.0.1:{runner.addresses[0][1]}", key, settings, worker, session, store, client, parts)
        await door.until(lambda: parts.directory.fleet.num_serving == 1 and parts.reader.is_open)
        yield door
        await runner.cleanup()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for name in await client.keys(prefix + "*"):
        await client.delete(name)
    await client.aclose()


@pytest.fixture
async def door(valkey_url: str) -> AsyncIterator[Door]:
    async with open_door(valkey_url) as opened:
        yield opened


@pytest.fixture
def open_another(valkey_url: str):
    """Opens a gateway with other settings or another template."""
    return lambda **changes: open_door(valkey_url, **changes)


@pytest.fixture
def chat_body() -> dict:
    return dict(CHAT)


@pytest.fixture
def script():
    """Helpers for scripted answers."""
    return type(
        "Script", (), {"words": staticmethod(words), "done": staticmethod(done), "spec": staticmethod(toy_spec)}
    )
