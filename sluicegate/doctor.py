"""`sluicegate doctor integrity`: every kind of damage in every mode, on stacks of its own, and what became of it.

A cell is one experiment: a request runs, one of its whole pages is struck, the request goes on; then a second request with the same prompt
finds the struck page in the prefix cache. Both answers are compared with that of an undamaged stack.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from redis.asyncio import Redis

from protocol.codec import decode
from protocol.faults import FAULT_KINDS, FaultOrder
from protocol.ids import ModelName, TenantId
from protocol.key_space import KeySpace
from protocol.model_card import WorkerStatus
from sluicegate.errors import CommandError
from sluicegate.faults import order_fault

MODES = ("off", "lease", "seal", "full")
TABLE_FAULTS = frozenset({"flip-lease", "table-off-by-one", "freed-page"})
PROMPT = (
    "The integrity of a cache means that what is read is what was written, where it was written, by whom it was written. "
    * 3
)
NEIGHBOUR = (
    "A neighbour in the batch must never notice anything of this, whatever happens beside it, and so it says: " * 2
)
NEIGHBOUR_TENANT = "neighbour"
NUM_TOKENS = 160
STRUCK_PAGE = 1
START_TIMEOUT_S = 120.0
# A worker tells of its counts four times a second.
SETTLE_S = 0.6


@dataclass(frozen=True, slots=True)
class Cell:
    """What one experiment gave. `found` are the ways in which the fault was noticed."""

    kind: str
    mode: str
    found: tuple[str, ...]
    is_right: bool
    is_reuse_right: bool
    is_neighbour_right: bool

    @property
    def is_claimed(self) -> bool:
        """Whether the mode promises to find this kind: in what a running request reads, or before a found prefix is used."""
        return self.mode in {"seal", "full"} or (self.mode == "lease" and self.kind in TABLE_FAULTS)

    @property
    def covers_running(self) -> bool:
        """Whether the mode promises that not even the struck request computes a token from the page."""
        return self.mode == "full" or (self.mode in {"lease", "seal"} and self.kind in TABLE_FAULTS)

    @property
    def is_as_claimed(self) -> bool:
        """Found, and no answer that the mode vouches for is wrong."""
        if not self.is_neighbour_right:
            return False
        if not self.is_claimed:
            return True
        return bool(self.found) and self.is_reuse_right and (self.is_right or not self.covers_running)

    @property
    def text(self) -> str:
        """For the table."""
        if not self.is_claimed:
            return "not covered" if not self.found else "found: " + ", ".join(self.found)
        if not self.is_as_claimed:
            return "MISSED" if not self.found else "WRONG ANSWER"
        healed = "healed" if self.is_right else "found at reuse"
        return f"{', '.join(self.found)}; {healed}"


def integrity(arguments: Namespace) -> None:
    """Run the experiments and print the matrix; exit with 1 if a mode doesn't keep what it claims."""
    kinds = arguments.kinds or list(FAULT_KINDS)
    cells = []
    for mode in arguments.modes or MODES:
        print(f"mode {mode}: starting a stack ...", file=sys.stderr, flush=True)
        cells += _examine_mode(mode, kinds, arguments.model)
    print(matrix(cells))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([_as_json(cell) for cell in cells], indent=1))
    if not all(cell.is_as_claimed for cell in cells):
        raise CommandError("a mode did not keep what it claims")


def matrix(cells: list[Cell]) -> str:
    """Kinds by modes, as a Markdown table."""
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    by_place = {(cell.kind, cell.mode): cell for cell in cells}
    lines = ["| fault | " + " | ".join(modes) + " |", "|---" * (len(modes) + 1) + "|"]
    kinds = dict.fromkeys(cell.kind for cell in cells)
    lines += [f"| {kind} | " + " | ".join(by_place[kind, mode].text for mode in modes) + " |" for kind in kinds]
    return "\n".join(lines)


def _as_json(cell: Cell) -> dict[str, Any]:
    return {
        "kind": cell.kind, "mode": cell.mode, "found": cell.found, "struck_request_is_right": cell.is_right,
        "reuse_is_right": cell.is_reuse_right, "neighbour_is_right": cell.is_neighbour_right,
        "is_claimed": cell.is_claimed, "is_as_claimed": cell.is_as_claimed,
    }  # fmt: skip


def _examine_mode(mode: str, kinds: list[str], model: str | None) -> list[Cell]:
    with tempfile.TemporaryDirectory(prefix="sluicegate-doctor-") as folder, _stack(Path(folder), mode, model) as stack:
        return asyncio.run(_examine(stack, mode, kinds))


@contextmanager
def _stack(folder: Path, mode: str, model: str | None) -> Iterator[dict[str, Any]]:
    """A running stack's stack.json."""
    command = [sys.executable, "-m", "sluicegate"]
    flags = ["up", "--data", str(folder), "--port", "0", "--integrity", mode, "--allow-fault-injection", "--detach"]
    flags += ["--model", model] if model else []
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode:
        raise CommandError(f"cannot start a stack: {done.stderr.strip() or done.stdout.strip()}")
    try:
        own = ["--data", str(folder)]
        subprocess.run([*command, "tenant", "create", NEIGHBOUR_TENANT, *own], capture_output=True, check=True)
        key = subprocess.run(
            [*command, "key", "create", NEIGHBOUR_TENANT, *own], capture_output=True, text=True, check=True
        )
        yield json.loads((folder / "stack.json").read_text()) | {"neighbour_key": key.stdout.split()[-1]}
    finally:
        subprocess.run([*command, "down", "--data", str(folder)], capture_output=True, check=False)


async def _examine(stack: dict[str, Any], mode: str, kinds: list[str]) -> list[Cell]:
    redis = Redis.from_url(stack["redis_url"])
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {stack['key']}"}) as session:
            patient = _Patient(stack, session, redis)
            return [await patient.examine(mode, kind) for kind in kinds]
    finally:
        await redis.aclose()


class _Patient:
    """A stack under examination."""

    def __init__(self, stack: dict[str, Any], session: aiohttp.ClientSession, redis: Any) -> None:
        self._stack = stack
        self._session = session
        self._redis = redis
        self._num_prompts = 0

    async def examine(self, mode: str, kind: str) -> Cell:
        """One experiment, under prompts that no other had."""
        self._num_prompts += 1
        prompt, neighbour = f"{self._num_prompts}. {PROMPT}", f"{self._num_prompts}. {NEIGHBOUR}"
        # Another salt is another namespace: clean answers leave no page that the experiment could find.
        clean, clean_neighbour = await asyncio.gather(
            self._answer(prompt, "clean"), self._answer(neighbour, "clean", self._stack["neighbour_key"])
        )
        before = await self._violations()
        beside = asyncio.ensure_future(self._answer(neighbour, None, self._stack["neighbour_key"]))
        struck, report = await self._struck_answer(prompt, kind)
        if report:
            if report.startswith("this fault copies"):  # there are no seals to forge in this mode
                return await self._unavailable(mode, kind, beside)
            raise CommandError(f"{kind} could not be injected: {report}")
        reused, beside_answer = await self._answer(prompt, None), await beside
        await asyncio.sleep(SETTLE_S)
        found = await self._violations() - before
        return Cell(
            kind, mode, tuple(sorted(found)), struck == clean, reused == clean, beside_answer == clean_neighbour
        )

    async def _unavailable(self, mode: str, kind: str, beside: "asyncio.Future[str]") -> Cell:
        await beside
        return Cell(kind, mode, (), is_right=True, is_reuse_right=True, is_neighbour_right=True)

    async def _struck_answer(self, prompt: str, kind: str) -> tuple[str, str]:
        """The answer of a request that is struck after its first token, and why it could not be."""
        text, problem, is_struck = [], "", False
        async for piece in self._stream(prompt, None):
            text.append(piece)
            if not is_struck:
                is_struck = True
                order = FaultOrder(f"doctor{self._num_prompts}", kind, TenantId(self._stack["tenant"]), -1, STRUCK_PAGE)
                report = await order_fault(self._redis, order, ModelName(self._stack["model"]), 2.0)
                problem = report.problem
        return "".join(text), problem

    async def _answer(self, prompt: str, salt: str | None, key: str | None = None) -> str:
        return "".join([piece async for piece in self._stream(prompt, salt, key)])

    async def _stream(self, prompt: str, salt: str | None, key: str | None = None) -> Any:
        body: dict[str, Any] = {
            "model": self._stack["model"], "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        if salt is not None:
            body["cache_salt"] = salt
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.post(f"{self._stack['url']}/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                yield f"[HTTP {response.status}]"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    yield (
                        event["choices"][0]["text"]
                        if event.get("choices")
                        else f"[{event.get('error', {}).get('code')}]"
                    )

    async def _violations(self) -> Counter[str]:
        """Counts of all workers, by the way in which they were noticed."""
        keys, model = KeySpace(), ModelName(self._stack["model"])
        counts: Counter[str] = Counter()
        for worker in await self._redis.zrange(keys.workers(model), 0, -1):
            raw = await self._redis.get(keys.worker(model, worker.decode()))
            if raw is not None:
                for name, count in decode(WorkerStatus, raw).integrity:
                    if name.startswith("violations_"):
                        counts[name.removeprefix("violations_")] += count
        return counts
