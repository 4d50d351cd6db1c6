"""What to change so that a plan fits: one thing at a time, each tried."""

from collections.abc import Iterator

from sluicegate.plan.capacity import Plan, gib
from sluicegate.plan.cards import CARDS
from sluicegate.plan.precision import shown_policies

MAX_GPUS = 1024


def shortfall(plan: Plan) -> str:
    """By how much it does not fit, in one line."""
    weights, wanted = sum(plan.weights_per_gpu.values()), plan.concurrency or 1
    requests = f"{wanted} request{'s' if wanted > 1 else ''} of {plan.context:,} tokens"
    if plan.pool_bytes < 0:
        return (
            f"does not fit: the weights take {gib(weights)} of each GPU, and {gib(plan.usable_bytes)} are there; with {requests} "
            f"{gib(plan.missing_bytes_per_gpu)} are missing"
        )
    return (
        f"does not fit: {requests} need {gib(plan.missing_bytes_per_gpu + plan.pool_bytes)} of KV on each GPU, and {gib(plan.pool_bytes)} are left beside the weights "
        f"({gib(plan.missing_bytes_per_gpu)} are missing)"
    )


def remedies(plan: Plan) -> list[str]:
    """Changes that would make it fit, the smallest of each kind."""
    return [*_precision(plan), *_less(plan), *_more_gpus(plan), *_other_cards(plan)]


def _precision(plan: Plan) -> Iterator[str]:
    if plan.kv_format != "fp8" and plan.but(kv_format="fp8").fits:
        yield "--kv fp8"
    smaller = [policy for policy in shown_policies(plan.shape, plan.policy) if plan.but(policy=policy).fits]
    if smaller:
        best = max(smaller, key=plan.checkpoint_bytes)
        yield f"--weights {best.name} ({gib(plan.checkpoint_bytes(best))} instead of {gib(plan.checkpoint_bytes(plan.policy))})"


def _less(plan: Plan) -> Iterator[str]:
    if plan.concurrency and plan.requests_that_fit:
        yield f"--concurrency {plan.requests_that_fit}"
    per_group = -(-(plan.concurrency or 1) // plan.num_groups)
    longest = plan.tokens_per_group // per_group // plan.page_size * plan.page_size
    if longest:
        yield f"--context {longest}"


def _more_gpus(plan: Plan) -> Iterator[str]:
    """More groups if one group suffices for one request, else the next larger group whose size divides the heads."""
    heads = plan.shape.attention.num_heads
    for tp in (size for size in range(plan.tp, min(heads, MAX_GPUS) + 1) if heads % size == 0):
        count = max(tp, plan.count // tp * tp)
        bigger = plan.but(tp=tp, count=count)
        per_group = bigger.tokens_per_group // (-(-plan.context // plan.page_size) * plan.page_size)
        if per_group:
            groups = max(bigger.num_groups, -(-(plan.concurrency or 1) // per_group))
            if groups * tp <= MAX_GPUS:
                yield f"--count {groups * tp} --tp {tp}"
                return


def _other_cards(plan: Plan) -> Iterator[str]:
    found = [card for card in CARDS.values() if card != plan.card and plan.but(card=card).fits]
    if found:
        card = min(found, key=lambda card: card.memory_bytes)
        yield f"--gpu {card.name}"
