"""A plan as text, and as what `--json` prints."""

from typing import Any

from sluicegate.plan.advice import remedies, shortfall
from sluicegate.plan.capacity import Decode, Plan, gib
from sluicegate.plan.parts import GROUPS
from sluicegate.plan.precision import shown_policies


def text(plan: Plan) -> str:
    """All of it, for people."""
    return "\n".join(["", *_model(plan), "", *_memory(plan), "", *_speed(plan), *_verdict(plan)]).strip("\n")


def _model(plan: Plan) -> list[str]:
    total = sum(plan.parameters.values())
    lines = [
        f"{plan.shape.name} ({plan.shape.family}): {_billions(total)} parameters, {_billions(plan.active_parameters)} for each token",
        "",
    ]
    lines += [f"  {group:<18} {_billions(plan.parameters[group]):>10}" for group in GROUPS if group in plan.parameters]
    lines += ["", f"  {'checkpoint':<18} {'GiB':>10} {'GB':>9}"]
    for policy in shown_policies(plan.shape, plan.policy):
        size = plan.checkpoint_bytes(policy)
        mark = "  <- planned" if policy.name == plan.policy.name else ""
        lines.append(f"  {policy.name:<18} {size / 2**30:>10,.1f} {size / 1e9:>9,.1f}{mark}")
    return lines


def _memory(plan: Plan) -> list[str]:
    weights = sum(plan.weights_per_gpu.values())
    groups = f", {plan.num_groups} groups of {plan.tp}" if plan.num_groups > 1 else f", one group of {plan.tp}"
    seals = plan.seal_bytes_per_token
    rows = [
        (
            "memory",
            f"{gib(plan.card.memory_bytes)}, of which {plan.memory_fraction:g} ({gib(plan.usable_bytes)}) for weights and KV",
        ),
        (
            "weights",
            f"{gib(weights)} ({plan.policy.name}{', with the prediction layer' if plan.holds_mtp and plan.shape.num_mtp else ''})",
        ),
        (
            "KV cache",
            f"{gib(max(0.0, plan.pool_bytes))}, at {plan.kv_bytes_per_token_and_gpu:,.0f} bytes a token ({plan.kv_format})",
        ),
    ]
    total = [
        (
            "KV per token",
            f"{plan.kv_bytes_per_token:,} bytes in one copy; seals {seals:,.1f} bytes more ({seals / plan.kv_bytes_per_token:.2%})",
        ),
        ("tokens that fit", f"{plan.tokens:,}"),
        ("requests that fit", f"{plan.requests_that_fit:,} of {plan.context:,} tokens at the same time"),
    ]
    lines = [f"{plan.count} x {plan.card.title}{groups}; on each GPU:", ""]
    lines += [f"  {name:<18} {value}" for name, value in rows]
    return [*lines, "", "on all of them:", "", *(f"  {name:<18} {value}" for name, value in total)]


def _speed(plan: Plan) -> list[str]:
    lines = [
        f"decode at {plan.context:,} tokens of context, if reading memory ({plan.card.bandwidth / 1e9:,.0f} GB/s) were all that takes time:",
        "",
    ]
    has_price = plan.gpu_hour is not None
    lines.append(
        f"  {'batch of a group':<18} {'GB read/GPU':>12} {'ms/token':>9} {'tokens/s':>10}"
        + (f" {'per 1M':>10}" if has_price else "")
    )
    for decode in plan.decodes():
        cost = "" if decode.cost_per_million is None else f" {decode.cost_per_million:>10,.3f}"
        experts = (
            f"   {decode.experts_read:.1f} experts of {plan.shape.experts.num_experts} a layer"
            if plan.shape.experts
            else ""
        )
        lines.append(
            f"  {decode.batch:<18,} {decode.bytes_per_gpu / 1e9:>12,.2f} {decode.seconds * 1e3:>9,.2f} {decode.tokens_per_second:>10,.0f}{cost}{experts}"
        )
    return lines


def _verdict(plan: Plan) -> list[str]:
    if plan.fits:
        return []
    found = remedies(plan)
    return [
        "",
        f"{plan.shape.name} {shortfall(plan)}.",
        *([f"Any of these would do: {'; '.join(found)}."] if found else ["Nothing that was tried would do."]),
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, for programs. Sizes in bytes."""
    return {
        "model": {
            "name": plan.shape.name,
            "family": plan.shape.family,
            "parameters": plan.parameters,
            "num_parameters": sum(plan.parameters.values()),
            "num_active_parameters": plan.active_parameters,
            "checkpoint_bytes": {p.name: plan.checkpoint_bytes(p) for p in shown_policies(plan.shape, plan.policy)},
        },
        "planned": {
            "gpu": plan.card.name, "count": plan.count, "tp": plan.tp, "weights": plan.policy.name, "kv": plan.kv_format,
            "context": plan.context, "concurrency": plan.concurrency, "memory_fraction": plan.memory_fraction,
            "page_size": plan.page_size, "gpu_hour": plan.gpu_hour, "mtp": plan.holds_mtp,
        },
        "per_gpu": {
            "memory_bytes": plan.card.memory_bytes,
            "usable_bytes": round(plan.usable_bytes),
            "weights_bytes": {group: round(size) for group, size in plan.weights_per_gpu.items()},
            "kv_pool_bytes": round(max(0.0, plan.pool_bytes)),
            "kv_bytes_per_token": plan.kv_bytes_per_token_and_gpu,
        },
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "seal_bytes_per_token": plan.seal_bytes_per_token,
        "tokens_that_fit": plan.tokens,
        "requests_that_fit": plan.requests_that_fit,
        "decode_floor": [_decode(decode) for decode in plan.decodes()],
        "fits": plan.fits,
        "missing_bytes_per_gpu": round(plan.missing_bytes_per_gpu),
        "remedies": [] if plan.fits else remedies(plan),
    }  # fmt: skip


def _decode(decode: Decode) -> dict[str, Any]:
    return {
        "batch": decode.batch,
        "bytes_per_gpu": round(decode.bytes_per_gpu),
        "experts_read_per_layer": decode.experts_read,
        "ms_per_token": decode.seconds * 1e3,
        "tokens_per_second": decode.tokens_per_second,
        "cost_per_million_tokens": decode.cost_per_million,
    }


def _billions(number: int) -> str:
    return f"{number / 1e9:,.2f} B" if number >= 1e9 else f"{number / 1e6:,.2f} M"
