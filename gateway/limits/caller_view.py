"""What a caller may see and ask for: the models that it's allowed, within the bounds of its tenant and its key."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.auth import Principal
from gateway.errors import bad_request
from gateway.intake.call import GenerationCall, ServedModel
from protocol.limits import Limits


@dataclass(frozen=True, slots=True)
class Bounds:
    """The narrower of two owners' bounds on one request; None is none."""

    context_tokens: int | None
    output_tokens: int | None
    samples: int | None


def bounds_of(caller: Principal) -> Bounds:
    """What tenant and key allow one request."""
    owners = (caller.record.limits, caller.key.limits)
    return Bounds(*(_least(owners, name) for name in ("context_tokens", "output_tokens", "samples")))


def models_of(caller: Principal, served: Iterable[ServedModel]) -> list[ServedModel]:
    """The models that the caller may use, each with the context and the output that it may have."""
    bounds = bounds_of(caller)
    return [
        ServedModel(
            model.name,
            model.card_digest,
            min(model.max_request_tokens, bounds.context_tokens or model.max_request_tokens),
            bounds.output_tokens,
        )
        for model in served
        if caller.record.may_use(model.name)
    ]


def check_samples(caller: Principal, call: GenerationCall) -> None:
    """Raises ApiError 400 if a call wants more answers than tenant and key may have."""
    most = bounds_of(caller).samples
    num_samples = len(call.prompts) * call.n
    if most is not None and num_samples > most:
        param = "n" if len(call.prompts) <= most else "prompt"
        raise bad_request(
            f"You may ask for at most {most} answers at once; this request asks for {num_samples}.", param
        )


def _least(owners: tuple[Limits, ...], name: str) -> int | None:
    found = [value for limits in owners if (value := getattr(limits, name)) is not None]
    return min(found, default=None)
