"""What a worker tells a gateway about a request, in order: Started, then PromptLogprobs if asked for, then Deltas, then
exactly one terminal message, Done or Failed. `REPLY_ORDER` says which may follow which.

Many requests' replies travel in one stream entry, a field for each request. Each carries its request, attempt and a sequence number that counts from 0
within the attempt: a duplicate is dropped by it, a gap is an error. Who ends a request on behalf of a dead worker can't know its
count and uses LAST_SEQUENCE, which follows any other.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from protocol.codec import decode_tagged, encode_tagged, pack, unpack_list
from protocol.errors import DecodeError
from protocol.ids import RequestId, WorkerId

LAST_SEQUENCE = 2**31 - 1

FinishReason = Literal["stop", "length"]
FailureCode = Literal[
    "internal_error", "worker_lost", "cancelled", "deadline_exceeded", "model_unavailable", "invalid_job",
    "kv_integrity_error", "overloaded", "shutting_down", "access_revoked",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the bytes it adds to the text, its natural-log probability, and the likeliest alternatives (id, bytes, logprob).

    Probabilities are the model's own, before temperature, penalties and filters; minus infinity is clamped to -9999.
    """

    token_id: int
    token: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has taken the job."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry for each prompt token; the first is None, since nothing precedes it. `token` is set for all of them."""

    tokens: tuple[bytes, ...]
    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to sample `index`.

    `text` is ready to show: whole UTF-8 characters, nothing that may still become a stop string. `token_ids` are all tokens
    sampled, `logprobs` the entries of the tokens whose text is in `text`. The last delta has a finish_reason, and the first one of a request
    says how many tokens of its prompt were found in the cache: an attempt that takes over can't know.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """All samples are complete. `completion_tokens` is the sum over the samples, end-of-text tokens included."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends here. `message` is fit to be shown to the client."""

    code: FailureCode
    message: str
    completion_tokens: int = 0


Reply = Started | PromptLogprobs | Delta | Done | Failed

_TAGS: dict[type, int] = {Started: 1, PromptLogprobs: 2, Delta: 3, Done: 4, Failed: 5}
_KINDS: dict[int, type] = {tag: kind for kind, tag in _TAGS.items()}
_DELTA = _TAGS[Delta]
_NEWER = [field.default for field in fields(Delta)[5:]]  # of fields after those that `_plain_delta` names

# From the kind of the last reply (None: none yet) to the kinds that may come next.
REPLY_ORDER: dict[type | None, frozenset[type]] = {
    None: frozenset({Started, Failed}),
    Started: frozenset({PromptLogprobs, Delta, Done, Failed}),
    PromptLogprobs: frozenset({Delta, Done, Failed}),
    Delta: frozenset({Delta, Done, Failed}),
    Done: frozenset(),
    Failed: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ReplyEnvelope:
    """A reply and its place: request, attempt, sequence number within the attempt."""

    request_id: RequestId
    attempt: int
    sequence: int
    reply: Reply = field(repr=False)


def encode_replies(envelopes: Iterable[ReplyEnvelope]) -> bytes:
    """The payload of a request's field, or of several requests."""
    rows = [[e.request_id, e.attempt, e.sequence, encode_tagged(_TAGS, e.reply)] for e in envelopes]
    return pack(rows)


def decode_replies(raw: bytes) -> list[ReplyEnvelope]:
    """The replies of a payload; raises DecodeError."""
    return [_envelope(row) for row in unpack_list(raw)]


def _envelope(row: object) -> ReplyEnvelope:
    if not isinstance(row, list) or len(row) != 4:
        raise DecodeError("a reply is [request, attempt, sequence, message]")
    request_id, attempt, sequence, message = row
    if type(request_id) is not str or type(attempt) is not int or type(sequence) is not int:
        raise DecodeError("a reply's request, attempt or sequence has the wrong type")
    reply = _plain_delta(message) or decode_tagged(_KINDS, message)
    return ReplyEnvelope(RequestId(request_id), attempt, sequence, reply)


def _plain_delta(message: object) -> Delta | None:
    """The message that comes for each token, checked by hand; None for whatever has logprobs or is unusual in any other way."""
    if type(message) is not list or len(message) < 6 or message[0] != _DELTA or type(message[0]) is not int:
        return None
    _, index, text, token_ids, logprobs, finish_reason, *newer = message
    if type(index) is not int or type(text) is not str or type(token_ids) is not list:
        return None
    if logprobs != [] or finish_reason is not None or (newer and newer != _NEWER[: len(newer)]):
        return None
    if len(token_ids) != 1 or type(token_ids[0]) is not int:
        return None
    return Delta(index, text, tuple(token_ids))
