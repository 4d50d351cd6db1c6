"""What a tenant or a key may use: limits, budgets, and the prices that turn tokens into money.

Money is counted in whole nano-units of the operator's currency, so that sums are exact: a price of 0.001 for a million tokens is one
nano-unit a token.
"""

from dataclasses import dataclass, fields
from typing import Literal

NANOS = 1_000_000_000
MAX_AMOUNT = 2**50  # Lua counts in doubles

Period = Literal["day", "month"]
BudgetUnit = Literal["tokens", "money"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds; None is no bound.

    Requests and tokens count over any 60 seconds: prompt tokens and the most that may be generated are reserved when a request is admitted
    and corrected when it ends. `context_tokens` bounds prompt + output of one prompt, `output_tokens` the output of one sample, `samples`
    the number of answers, n x prompts.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_jobs: int | None = None
    context_tokens: int | None = None
    output_tokens: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 1 <= value <= MAX_AMOUNT:
                raise ValueError(f"{field.name} must be 1 to {MAX_AMOUNT}")


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be used in a day or a month (UTC): tokens, or nano-units of money."""

    period: Period
    unit: BudgetUnit
    amount: int

    def __post_init__(self) -> None:
        if not 1 <= self.amount <= MAX_AMOUNT:
            raise ValueError(f"a budget's amount must be 1 to {MAX_AMOUNT} tokens or nano-units")


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-units of money for one token. A prompt token that was found in the cache costs `cached_input`."""

    input: int
    cached_input: int
    output: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= NANOS:
                raise ValueError(f"the {field.name} price must be 0 to 1000000 for a million tokens")

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """Nano-units for a request. Cached tokens are among the prompt's."""
        fresh = max(prompt_tokens - cached_tokens, 0)
        return fresh * self.input + cached_tokens * self.cached_input + completion_tokens * self.output

    @property
    def dearest_input(self) -> int:
        """What a prompt token costs at most: before a request ran nobody knows what is cached."""
        return max(self.input, self.cached_input)


FREE = Price(0, 0, 0)


def money_to_nanos(amount: float) -> int:
    """A sum of money in nano-units."""
    return round(amount * NANOS)


def price_to_nanos(per_million: float) -> int:
    """A price for a million tokens in nano-units for one token, in steps of 0.001."""
    return round(per_million * NANOS / 1_000_000)


def nanos_to_price(nanos: int) -> float:
    """The inverse of `price_to_nanos`."""
    return nanos / 1000
