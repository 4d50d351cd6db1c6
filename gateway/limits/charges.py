"""Which limits a request counts against, and how much of each it takes."""

from dataclasses import dataclass
from typing import Literal

from gateway.auth import Principal
from gateway.intake.call import GenerationCall
from protocol.ids import RequestId
from protocol.key_space import KeySpace
from protocol.limits import Price
from protocol.tenancy import ApiKey, Tenant

What = Literal["requests", "tokens", "concurrent", "queued", "budget_tokens", "budget_money"]
Owner = Literal["tenant", "key"]
_KINDS: dict[What, str] = {
    "requests": "window", "tokens": "window", "concurrent": "lease", "queued": "lease",
    "budget_tokens": "budget", "budget_money": "budget",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Charge:
    """One limit, and what a request takes of it until it's settled. `members` are what a lease holds."""

    what: What
    owner: Owner
    redis_key: str
    limit: int
    amount: int
    period: str = ""
    members: tuple[str, ...] = ()

    def wire(self) -> list[object]:
        """As the ADMIT script reads it."""
        return [_KINDS[self.what], self.limit, self.amount, self.period, list(self.members)]


@dataclass(frozen=True, slots=True)
class Ask:
    """The most that a request can use."""

    account_id: str
    job_ids: tuple[RequestId, ...]
    prompt_tokens: int
    output_tokens: int
    samples: int

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens

    def cost(self, price: Price) -> int:
        """The most that it can cost, in nano-units."""
        return self.prompt_tokens * price.dearest_input + self.output_tokens * price.output


def ask_of(call: GenerationCall, account_id: str, job_ids: tuple[RequestId, ...]) -> Ask:
    """What a call can use at most. A prompt is computed once for all its samples."""
    return Ask(
        account_id,
        job_ids,
        sum(map(len, call.prompts)),
        sum(sampling.max_tokens for sampling in call.samplings) * call.n,
        len(call.prompts) * call.n,
    )


def charges_of(keys: KeySpace, caller: Principal, ask: Ask, price: Price) -> list[Charge]:
    """All charges of a request: those of its tenant, then those of its key."""
    return [
        *owner_charges(keys, caller.record, None, ask, price),
        *owner_charges(keys, caller.record, caller.key, ask, price),
    ]


def owner_charges(keys: KeySpace, tenant: Tenant, key: ApiKey | None, ask: Ask, price: Price) -> list[Charge]:
    """The charges to a tenant, or to a key of the tenant."""
    source: Tenant | ApiKey = key or tenant
    owner: Owner = "key" if key else "tenant"
    name = key.id if key else "tenant"
    limits = source.limits
    amounts: tuple[tuple[What, int | None, int, tuple[str, ...]], ...] = (
        ("requests", limits.requests_per_minute, 1, ()),
        ("tokens", limits.tokens_per_minute, ask.tokens, ()),
        ("concurrent", limits.concurrent_requests, 1, (ask.account_id,)),
        ("queued", limits.queued_jobs, len(ask.job_ids), ask.job_ids),
    )
    charges = [
        Charge(what, owner, keys.account(tenant.id, f"{name}:{what}"), limit, amount, members=members)
        for what, limit, amount, members in amounts
        if limit is not None
    ]
    for budget in source.budgets:
        place = keys.account(tenant.id, f"{name}:budget:{budget.period}:{budget.unit}")
        amount = ask.tokens if budget.unit == "tokens" else ask.cost(price)
        what: What = "budget_tokens" if budget.unit == "tokens" else "budget_money"
        charges.append(Charge(what, owner, place, budget.amount, amount, budget.period))
    return charges
