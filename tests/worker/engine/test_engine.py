"""Requests end once, whatever happens to them, and leave nothing behind."""

import random

import pytest
import torch

from protocol.replies import Delta, Done, Failed, PromptLogprobs, Started
from worker.engine import MAX_REMEMBERED_CANCELS


def _terminals(replies: list) -> list:
    return [reply for reply in replies if isinstance(reply, (Done, Failed))]


def test_replies_come_in_order(lab) -> None:
    """Started, then the tokens, then one Done with the true counts."""
    (replies,) = lab.run(lab.engine(), lab.job("The capital of France is", max_tokens=5))
    assert isinstance(replies[0], Started)
    assert all(isinstance(reply, Delta) for reply in replies[1:-1])
    assert Done(5, 0, 5) == replies[-1]


def test_steps_are_counted_by_batch_size(lab) -> None:
    """Each step falls into one size, and the sizes add up to the sequences that ran."""
    engine = lab.engine()
    lab.run(engine, lab.job("The capital", max_tokens=6), lab.job("Of France", max_tokens=3))
    totals = engine.totals
    assert totals.steps == sum(totals.batch_sizes)
    assert totals.batched_sequences == totals.batch_sizes[0] + 2 * totals.batch_sizes[1]
    assert min(totals.batch_sizes[:2]) > 0


def test_cancel_at_any_step_frees_everything(lab) -> None:
    """Before the first step, in a chunk of the prompt, while decoding: one terminal reply, no page held."""
    for at in (1, 2, 3, 6, 12):
        engine = lab.engine(step_tokens=32)
        job = lab.job("word " * 90, max_tokens=40, n=2, temperature=1.0)
        (replies,) = lab.run(
            engine, job, on_step=lambda number, at=at, e=engine, j=job: number == at and e.cancel(j.request_id)
        )
        assert ["cancelled"] == [reply.code for reply in _terminals(replies)]
        assert 0 == engine.cache.pool.num_held
        assert not engine.scheduler.running
        assert 0 == len(engine.scheduler.queue)


def test_a_cancel_that_comes_first_is_remembered(lab) -> None:
    """A job that was cancelled before it arrived doesn't start; unknown ids are harmless."""
    engine = lab.engine()
    job = lab.job("too late")
    engine.cancel(job.request_id)
    engine.cancel("nobody")
    (replies,) = lab.run(engine, job)
    assert ["cancelled"] == [reply.code for reply in _terminals(replies)]


def test_the_latest_cancels_are_remembered_however_many_there_were(lab) -> None:
    """A worker hears of the cancellations of all others' requests too: they take a bounded place and push nothing out that's newer."""
    engine = lab.engine()
    job = lab.job("too late")
    for number in range(MAX_REMEMBERED_CANCELS + 10):
        engine.cancel(f"somebody-{number}")
    engine.cancel(job.request_id)
    assert len(engine._cancelled) == MAX_REMEMBERED_CANCELS
    (replies,) = lab.run(engine, job)
    assert ["cancelled"] == [reply.code for reply in _terminals(replies)]


def test_an_aborted_prompt_does_not_poison_the_cache(lab, result_of) -> None:
    """A prompt whose computation was cut off at any chunk gives the right answer afterwards."""
    prompt = "In the beginning there was a small program that counted things. " * 10
    expected = result_of(lab.run(lab.engine(), lab.job(prompt))[0])
    engine = lab.engine(step_tokens=32)
    for at in (2, 3, 4):
        job = lab.job(prompt)
        lab.run(engine, job, on_step=lambda number, at=at, j=job: number == at and engine.cancel(j.request_id))
        assert 0 == len(engine.cache.index)
    assert expected == result_of(lab.run(engine, lab.job(prompt))[0])


def test_deadlines_end_requests(lab) -> None:
    """A request whose time has passed ends with that error, queued or running."""
    engine = lab.engine()

    def late(number: int) -> None:
        lab.now_ms = 2**61 if number == 4 else 0

    (replies,) = lab.run(engine, lab.job("slow", max_tokens=500), on_step=late)
    lab.now_ms = 0
    assert ["deadline_exceeded"] == [reply.code for reply in _terminals(replies)]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ((), {}),
        ((-1,), {}),
        ((10**6,), {}),
        ((1,) * 4000, {"max_tokens": 200}),
        ((1,), {"max_tokens": -1}),
        ((1,), {"n": 0}),
    ],
)
def test_jobs_that_cannot_be_served_fail_at_once(lab, prompt, options) -> None:
    """A signed job that is impossible all the same gets an error, and the engine goes on."""
    engine = lab.engine()
    (replies,) = lab.run(engine, lab.job(prompt, **options))
    assert ["invalid_job"] == [reply.code for reply in _terminals(replies)]


def test_a_request_as_large_as_the_pool_is_served(lab) -> None:
    """The last token fits."""
    engine = lab.engine(kv_tokens=256)
    (replies,) = lab.run(engine, lab.job((1000,) * 240, max_tokens=16, ignore_eos=True))
    assert Done(240, 0, 16) == replies[-1]


def _poison(engine, page: int) -> None:
    engine._parts.executor.kv.k[0, page].fill_(float("nan"))


def test_a_nan_ends_its_own_request_only(lab, result_of) -> None:
    """A poisoned page fails its request, is scrubbed and never shared; neighbours keep their bits; a retry is clean."""
    victim_prompt, neighbour_prompt = "Poison is " * 20, "Healthy neighbours are"
    clean = result_of(lab.run(lab.engine(), lab.job(victim_prompt))[0])
    healthy = result_of(lab.run(lab.engine(), lab.job(neighbour_prompt))[0])
    engine = lab.engine()
    victim = lab.job(victim_prompt, max_tokens=30)

    def strike(number: int) -> None:
        if number == 5:
            (sequence,) = [s for s in engine.scheduler.running if s.request.job is victim]
            _poison(engine, sequence.table.leases[0].page)

    failed, neighbour = lab.run(engine, victim, lab.job(neighbour_prompt), on_step=strike)
    assert ["internal_error"] == [reply.code for reply in _terminals(failed)]
    assert healthy == result_of(neighbour)
    assert not bool(torch.isnan(engine._parts.executor.kv.k.float()).any())
    assert clean == result_of(lab.run(engine, lab.job(victim_prompt))[0])


def test_a_stale_lease_heals_once_and_fails_the_second_time(lab, result_of) -> None:
    """A page whose tag changed under a sequence: recomputed without a trace, and an error if it happens again."""
    prompt = "Integrity means that " * 10
    expected = result_of(lab.run(lab.engine(), lab.job(prompt))[0])
    for strikes, outcome in (((6,), None), ((6, 9), "kv_integrity_error")):
        engine = lab.engine()

        def strike(number: int, engine=engine, strikes=strikes) -> None:
            if number in strikes and engine.scheduler.running:
                engine.cache.pool.tags[engine.scheduler.running[0].table.leases[1].page] ^= 1

        (replies,) = lab.run(engine, lab.job(prompt), on_step=strike)
        if outcome is None:
            assert expected == result_of(replies)
        else:
            assert [outcome] == [reply.code for reply in _terminals(replies)]
        assert len(strikes) == engine.integrity.totals.num_violations
        assert 0 == engine.cache.pool.num_quarantined


def test_a_table_that_points_elsewhere_is_noticed(lab, result_of) -> None:
    """An entry off by one leads into another tenant's page: noticed before the step, answered as if nothing had been."""
    mine, theirs = lab.job("Mine is " * 20), lab.job("Theirs is " * 20, tenant="other")
    expected = [result_of(lab.run(lab.engine(), job)[0]) for job in (mine, theirs)]
    engine = lab.engine()

    def strike(number: int) -> None:
        if number == 5:
            first, second = engine.scheduler.running[:2]
            first.table.pages[0] = second.table.pages[0]

    replies = lab.run(engine, lab.job("Mine is " * 20), lab.job("Theirs is " * 20, tenant="other"), on_step=strike)
    assert expected == [result_of(one) for one in replies]
    assert 1 == engine.integrity.totals.num_violations


def test_an_exception_in_the_model_fails_its_batch_and_not_the_engine(lab, monkeypatch) -> None:
    """Whatever the forward pass raises, requests get an error and the next ones are served."""
    engine = lab.engine()

    def broken(step, pool):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._parts.executor.model), "forward", lambda self, step, pool: broken(step, pool))
        replies = lab.run(engine, lab.job("one", n=2, temperature=1.0), lab.job("two"))
    assert ["internal_error"] * 2 == [reply.code for one in replies for reply in _terminals(one)]
    assert Done(1, 0, 3) == lab.run(engine, lab.job("one", max_tokens=3))[0][-1]


def test_tenants_and_salts_do_not_share(lab) -> None:
    """The same tenant hits; another tenant, or another salt, doesn't."""
    engine, prompt = lab.engine(), "Shared prefixes are private. " * 10
    cached = []
    for tenant, salt in (("a", None), ("a", None), ("b", None), ("a", "x"), ("a", "x"), ("b", "x")):
        (replies,) = lab.run(engine, lab.job(prompt, tenant=tenant, salt=salt, max_tokens=1))
        cached.append(replies[-1].cached_tokens > 0)
    assert [False, True, False, False, True, False] == cached


def test_samples_after_the_first_reuse_its_prompt(lab) -> None:
    """n=4 computes the prompt once, and counts it once."""
    engine = lab.engine()
    (replies,) = lab.run(engine, lab.job("A long prompt " * 20, n=4, temperature=1.0, max_tokens=2))
    done = replies[-1]
    assert engine.totals.prompt_tokens == done.prompt_tokens
    assert 8 == done.completion_tokens


def test_a_long_prompt_does_not_hold_up_a_running_stream(lab) -> None:
    """While a long prompt is computed in chunks, a running sequence gets a token in every step."""
    engine = lab.engine(step_tokens=64)
    stream = lab.job("Go", max_tokens=40, ignore_eos=True)
    lengths = []

    def arrive(number: int) -> None:
        if number == 5:
            engine.submit(lab.job("long " * 900, tenant="other", max_tokens=1))
        lengths.extend(s.num_output for s in engine.scheduler.running if s.request.job is stream)

    lab.run(engine, stream, on_step=arrive)
    assert list(range(1, len(lengths) + 1)) == lengths


def test_a_flooding_tenant_does_not_take_anothers_turn(lab) -> None:
    """With one slot and twenty waiting requests of one tenant, another tenant's request is next."""
    engine = lab.engine(max_sequences=1)
    flood = [lab.job(f"Flood {i}", tenant="flood", max_tokens=4) for i in range(20)]
    quiet = lab.job("Quiet", tenant="quiet", max_tokens=4)
    finished = []
    for job in flood:
        engine.submit(job)
    for number in range(400):
        if number == 6:
            engine.submit(quiet)
        finished += [o.envelope.request_id for o in engine.step() if o.is_terminal]
        if not engine.has_work:
            break
    assert finished.index(quiet.request_id) <= 3


def test_echo_reports_the_prompt(lab) -> None:
    """Prompt logprobs: one entry for each token, the first None, the same whatever the chunks; max_tokens=0 ends there."""
    reports = []
    for step_tokens in (32, 256):
        (replies,) = lab.run(
            lab.engine(step_tokens=step_tokens), lab.job("Every word of this counts. " * 6, echo=2, max_tokens=0)
        )
        (report,) = [reply for reply in replies if isinstance(reply, PromptLogprobs)]
        reports.append(report)
    assert reports[0] == reports[1]
    assert report.entries[0] is None
    assert all(entry is not None and len(entry.top) == 2 for entry in report.entries[1:])
    assert b"".join(report.tokens).decode() == "Every word of this counts. " * 6


def test_random_traffic_leaves_nothing(lab) -> None:
    """200 random requests of three tenants, many cancelled, in a small pool: each ends once and all pages come back."""
    rng, engine, ended, alive = random.Random(8), lab.engine(kv_tokens=512, step_tokens=64, max_sequences=8), {}, []
    for number in range(120):
        job = lab.job(
            "word " * rng.randrange(1, 60), tenant=rng.choice("abc"), n=rng.choice([1, 1, 1, 2]), temperature=1.0, seed=number,
            max_tokens=rng.randrange(1, 20), stop=(" the",) if rng.random() < 0.2 else (),
        )  # fmt: skip
        engine.submit(job)
        alive.append(job.request_id)
        for _ in range(rng.randrange(4)):
            if rng.random() < 0.3:
                engine.cancel(rng.choice(alive))
            for outgoing in engine.step():
                if outgoing.is_terminal:
                    ended[outgoing.envelope.request_id] = ended.get(outgoing.envelope.request_id, 0) + 1
            engine.check_invariants()
    while engine.has_work:
        for outgoing in engine.step():
            if outgoing.is_terminal:
                ended[outgoing.envelope.request_id] = ended.get(outgoing.envelope.request_id, 0) + 1
    for outgoing in engine.take_replies():
        ended[outgoing.envelope.request_id] = ended.get(outgoing.envelope.request_id, 0) + outgoing.is_terminal
    assert dict.fromkeys(alive, 1) == ended
    assert 0 == engine.cache.pool.num_held
    assert engine.cache.pool.num_pages == engine.cache.num_available()
