"""Any walk through the table of replies, with interruptions, stale attempts and duplicates: the client gets the undisturbed answer, once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.mailbox import Mailbox
from gateway.pending_job import PendingJob
from protocol.job import Job, SamplingParams
from protocol.replies import (
    LAST_SEQUENCE,
    REPLY_ORDER,
    Delta,
    Done,
    Failed,
    PromptLogprobs,
    ReplyEnvelope,
    Started,
)


def _pending(n: int = 1, echo: int | None = None) -> PendingJob:
    job = Job("r", "g", "t", "m", (1, 2, 3), SamplingParams(max_tokens=9, seed=1), 0, 1, n=n, prompt_logprobs=echo)
    return PendingJob(job, 0, Mailbox(), 1e9)


def _answer(lengths: list[int], job: Job) -> list:
    """What a worker says to an attempt, given what is said to have come before: one token a delta, samples in turn."""
    progress = job.progress.samples if job.progress else ()
    replies: list = [Started("w")]
    if job.prompt_logprobs is not None:
        replies.append(PromptLogprobs((b"a",), (None,)))
    cached = 7 if job.progress is None else None
    for place in range(max(lengths)):
        for index, length in enumerate(lengths):
            if place >= length or (progress and place < len(progress[index].token_ids)):
                continue
            finish = "stop" if place == length - 1 else None
            replies.append(Delta(index, f"<{index}.{place}>", (100 * index + place,), (), finish, cached))
            cached = None
    known = 7 if job.progress is None else job.progress.cached_tokens
    return [*replies, Done(3, known, sum(lengths))]


def _envelopes(job: Job, replies: list) -> list[ReplyEnvelope]:
    return [ReplyEnvelope(job.request_id, job.attempt, number, reply) for number, reply in enumerate(replies)]


def _received(pending: PendingJob) -> list:
    return [reply for _, reply in pending.mailbox._waiting]


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    echo=st.booleans(),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.booleans()), max_size=4),
    repeats=st.lists(st.integers(0, 12), max_size=6),
)
def test_the_client_gets_the_undisturbed_answer_once(lengths, echo, cuts, repeats) -> None:
    """Attempts end anywhere; what they said late comes before, during or after the change to the next."""
    pending = _pending(len(lengths), 0 if echo else None)
    expected = _answer(lengths, pending.job)[1:]
    stale: list[ReplyEnvelope] = []
    for cut, late, is_rejected in cuts:
        said = _envelopes(pending.job, _answer(lengths, pending.job))
        for envelope in said[: min(cut, len(said) - 1)]:
            pending.receive(envelope)
        if pending.finish_if_complete():
            break
        rest = said[cut:-1]
        if is_rejected:
            # Its worker was at it after all: nothing that came meanwhile may be missing.
            pending.propose()
            for envelope in rest[:late]:
                pending.receive(envelope)
            pending.reject(0.0)
            rest = rest[late:]
        if pending.finish_if_complete():
            break
        proposal = pending.propose()
        for envelope in rest[:late]:
            pending.receive(envelope)
        assert proposal is pending.propose()
        pending.accept(0.0)
        stale += said
        for envelope in stale[-late:]:
            pending.receive(envelope)
    said = _envelopes(pending.job, _answer(lengths, pending.job))
    for number, envelope in enumerate(said):
        pending.receive(envelope)
        if number in repeats:
            pending.receive(envelope)
        for old in stale[:1]:
            pending.receive(old)
    received = _received(pending)

    def by_sample(replies):
        return [[r for r in replies if isinstance(r, Delta) and r.index == i] for i in range(len(lengths))]

    def plain(samples):
        return [[(d.text, d.token_ids, d.finish_reason) for d in deltas] for deltas in samples]

    assert plain(by_sample(expected)) == plain(by_sample(received))
    assert int(echo) == sum(isinstance(reply, PromptLogprobs) for reply in received)
    assert [expected[-1]] == [reply for reply in received if isinstance(reply, (Done, Failed))]
    assert sum(lengths) == pending.completion_tokens


kinds = st.sampled_from(
    [Started("w"), PromptLogprobs((), ()), Delta(0, "x", (1,)), Done(1, 0, 1), Failed("cancelled", "x")]
)


@given(st.lists(kinds, min_size=1, max_size=8))
def test_the_order_of_replies_is_the_table(replies) -> None:
    """A walk of the table is passed on; the first step off it ends the job with an error."""
    pending = _pending()
    last, expected = None, []
    for number, reply in enumerate(replies):
        if last in (Done, Failed):
            break
        pending.receive(ReplyEnvelope("r", 1, number, reply))
        if type(reply) not in REPLY_ORDER[last]:
            expected.append("internal_error")
            break
        last = type(reply)
        if last is not Started:
            expected.append(reply)
    got = _received(pending)
    if expected and expected[-1] == "internal_error":
        assert "internal_error" == got[-1].code
        assert pending.has_failed_here
        got, expected = got[:-1], expected[:-1]
    assert expected == got


@pytest.mark.parametrize("sequence", [1, 5])
def test_a_gap_ends_the_job(sequence) -> None:
    """Part of an answer is no answer."""
    pending = _pending()
    pending.receive(ReplyEnvelope("r", 1, 0, Started("w")))
    pending.receive(ReplyEnvelope("r", 1, sequence + 1, Delta(0, "x", (1,))))
    assert "internal_error" == pending.last.code


def test_who_gives_a_job_up_need_not_know_how_far_it_was() -> None:
    """The last sequence number follows any other."""
    pending = _pending()
    pending.receive(ReplyEnvelope("r", 1, 0, Started("w")))
    pending.receive(ReplyEnvelope("r", 1, LAST_SEQUENCE, Failed("worker_lost", "given up")))
    assert "worker_lost" == pending.last.code


async def test_taking_waits_for_something() -> None:
    """A mailbox hands out all that has come, in order, and waits if there's nothing."""
    mailbox = Mailbox()
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    mailbox.put(0, Started("w"))
    assert [(0, Started("w"))] == await taking
    assert mailbox.is_empty
