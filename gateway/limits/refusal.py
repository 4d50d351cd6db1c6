"""429, and the headers that tell a client where it stands."""

from dataclasses import dataclass

from gateway.errors import ApiError
from gateway.limits.charges import Charge, What

_TEXTS: dict[What, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrent": "concurrent requests",
    "queued": "queued jobs",
    "budget_tokens": "tokens in its budget",
    "budget_money": "money in its budget",
}
_HEADERS: tuple[What, ...] = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Standing:
    """A charge's counter after the script ran: what is used, and in how many seconds all of it is free again."""

    charge: Charge
    used: int
    reset_s: int

    @property
    def remaining(self) -> int:
        """What is left."""
        return max(self.charge.limit - self.used, 0)


def rate_headers(standings: list[Standing]) -> dict[str, str]:
    """x-ratelimit-{limit,remaining,reset}-{requests,tokens}: of tenant and key, the one with less left."""
    headers = {}
    for what in _HEADERS:
        found = [standing for standing in standings if standing.charge.what == what]
        if found:
            tightest = min(found, key=lambda standing: standing.remaining)
            headers[f"x-ratelimit-limit-{what}"] = str(tightest.charge.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{tightest.reset_s}s"
    return headers


def refusal(charge: Charge, wait_s: int, standings: list[Standing]) -> ApiError:
    """The 429 for the charge that didn't fit. `wait_s` is -1 if it never will."""
    is_budget = charge.what.startswith("budget")
    whose = "This tenant" if charge.owner == "tenant" else "This API key"
    headers = rate_headers(standings)
    if wait_s >= 0:
        headers["Retry-After"] = str(max(wait_s, 1))
    if wait_s < 0 or is_budget:
        # A client that tries again by itself gives up after minutes at most.
        headers["x-should-retry"] = "false"
    if is_budget:
        message = f"{whose} has not enough {_TEXTS[charge.what]} of this {charge.period} left for this request."
        return ApiError(429, message, "insufficient_quota", "insufficient_quota", headers=headers)
    unit = _TEXTS[charge.what]
    message = f"{whose} may have {charge.limit} {unit}"
    message += f"; this request alone asks for {charge.amount}." if wait_s < 0 else ". Try again later."
    return ApiError(429, message, "rate_limit_error", "rate_limit_exceeded", headers=headers)
