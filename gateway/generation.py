"""One HTTP request's jobs: submitted together, answered through one mailbox, taken back if the request ends before they do, and counted once."""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.auth import Principal
from gateway.errors import from_failure
from gateway.intake.call import GenerationCall
from gateway.limits.account import Account
from gateway.limits.ledger import Ledger
from gateway.mailbox import Mailbox
from gateway.metrics import JobMoment, tenant_class
from gateway.pending_job import PendingJob
from gateway.redis_link import RedisLink
from gateway.reply_reader import ReplyReader
from gateway.routing import Router
from gateway.settings import GatewaySettings
from gateway.share_book import ShareBook
from gateway.submitter import Submitter, now_ms
from gateway.tracing import current_context
from protocol.ids import ModelName, new_request_id
from protocol.job import Job
from protocol.replies import Done, Failed, Reply


class Generation:
    """A request's jobs while it's answered."""

    def __init__(self, mailbox: Mailbox, jobs: list[PendingJob], caller: Principal, account: Account) -> None:
        self._mailbox = mailbox
        self.jobs = jobs
        self.caller = caller
        self.account = account
        # Until which change of tenants and keys its caller is known to be welcome.
        self.checked_revision = caller.revision
        self._since_s = asyncio.get_running_loop().time()

    async def take(self) -> list[tuple[int, Reply]]:
        """The replies that have come since the last call, at least one: (prompt number, reply). Done and Failed are among them."""
        return await self._mailbox.take()

    @property
    def is_finished(self) -> bool:
        """Whether all jobs have ended and everything they said was taken: a job can end while its last replies still wait here."""
        return self._mailbox.is_empty and all(job.is_finished for job in self.jobs)

    def moments(self) -> list[JobMoment]:
        """Its jobs that have not ended."""
        name = tenant_class(self.caller.weight)
        return [
            JobMoment(job.model, name, "queued" if job.worker_id is None else "running", self._since_s)
            for job in self.jobs
            if not job.is_finished
        ]

    def usage(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens of the jobs that are done."""
        done = [job.last for job in self.jobs if isinstance(job.last, Done)]
        return (
            sum(last.prompt_tokens for last in done),
            sum(last.cached_tokens for last in done),
            sum(last.completion_tokens for last in done),
        )


class Generations:
    """Opens and closes them."""

    def __init__(
        self,
        settings: GatewaySettings,
        link: RedisLink,
        reader: ReplyReader,
        submitter: Submitter,
        ledger: Ledger,
        shares: ShareBook,
        router: Router,
    ) -> None:
        self._settings = settings
        self._link = link
        self._reader = reader
        self._submitter = submitter
        self._ledger = ledger
        self._shares = shares
        self._router = router
        self._open: set[Generation] = set()

    @asynccontextmanager
    async def open(
        self, call: GenerationCall, caller: Principal, session: str | None = None
    ) -> AsyncIterator[Generation]:
        """Admit a call of a client's session, if it has named one, and submit its jobs; whatever way the block is left, none of them is left behind.

        Raises ApiError.
        """
        mailbox = Mailbox()
        timeout_s = call.timeout_s or self._settings.request_timeout_s
        group = await self._shares.identity(caller.tenant, call.share_group)
        name = self._router.session(ModelName(call.model), caller.tenant, caller.record.created_ms, session)
        jobs = (self._job(call, slot, caller, timeout_s, group, name) for slot in range(len(call.prompts)))
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        pending = [PendingJob(job, slot, mailbox, deadline_s) for slot, job in enumerate(jobs)]
        account = await self._ledger.admit(call, caller, pending)
        generation = Generation(mailbox, pending, caller, account)
        for job in pending:
            self._reader.expect(job)
        self._open.add(generation)
        try:
            await self._link.call(self._reader.attend(ModelName(call.model)))
            for job in pending:
                await self._submitter.submit(job, caller.weight)
            yield generation
        finally:
            self._open.discard(generation)
            for job in pending:
                self._reader.forget(job)
                if job.is_accepted and (not job.is_finished or job.has_failed_here):
                    self._submitter.withdraw(job)
            self._ledger.settle(account)

    def fail(self, generation: Generation, failed: Failed) -> None:
        """End a request from this side."""
        for job in generation.jobs:
            if not job.is_finished:
                job.fail(failed)
                self._submitter.withdraw(job)

    def fail_all(self, failed: Failed) -> None:
        """End what's open from this side."""
        for generation in self._open:
            self.fail(generation, failed)

    def unchecked(self, revision: int) -> list[Generation]:
        """Open requests whose callers were not looked up again since a change."""
        return [generation for generation in self._open if generation.checked_revision != revision]

    def moments(self) -> list[JobMoment]:
        """The jobs that have not ended."""
        return [moment for generation in self._open for moment in generation.moments()]

    @property
    def num_open(self) -> int:
        """Requests that are being answered."""
        return len(self._open)

    async def close(self) -> None:
        """Until all usage is written and all cancellations are sent."""
        await self._ledger.close()
        await self._submitter.close()

    def _job(
        self,
        call: GenerationCall,
        slot: int,
        caller: Principal,
        timeout_s: float,
        group: str | None,
        session: bytes | None,
    ) -> Job:
        created_ms = now_ms()
        sampling = call.samplings[slot]
        return Job(
            request_id=new_request_id(),
            gateway_id=self._settings.gateway_id,
            tenant=caller.tenant,
            model=ModelName(call.model),
            prompt_token_ids=call.prompts[slot],
            sampling=sampling,
            created_ms=created_ms,
            deadline_ms=created_ms + int(timeout_s * 1000),
            n=call.n,
            # Echo needs the prompt's tokens as text, which come with its logprobs.
            prompt_logprobs=(sampling.logprobs or 0) if call.echo else None,
            cache_salt=self._salt(caller.tenant if group is None else group, call.cache_salt),
            priority=call.priority,
            trace_context=current_context(),
            share_group=group,
            tenant_since_ms=caller.record.created_ms,
            session=session,
        )

    def _salt(self, owner: str, salt: str | None) -> str | None:
        """What the worker gets for a client's salt: it may be a secret of the client's, and Redis writes jobs to disk."""
        if salt is None:
            return None
        message = f"cache-salt\0{owner}\0{salt}".encode()
        return hmac.digest(self._settings.key_pepper, message, hashlib.sha256).hex()


def raise_if_failed(replies: list[tuple[int, Reply]]) -> None:
    """Raise the ApiError of the first failure among replies."""
    for _, reply in replies:
        if isinstance(reply, Failed):
            raise from_failure(reply)
