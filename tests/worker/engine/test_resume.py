"""An answer that another engine began goes on exactly as it would have, from any token on."""

import dataclasses

import pytest

from protocol.job import Progress, SampleProgress
from protocol.replies import Delta, Done, PromptLogprobs

RULES = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "penalties": {"frequency_penalty": 0.8, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 3},
    "held back": {"stop": ("never in the text", " the the the"), "logprobs": 2},
    "stopped": {"stop": (" and",), "logprobs": 1},
    "samples": {"n": 3, "temperature": 1.0, "seed": 5, "logprobs": 1},
    "min_tokens": {"min_tokens": 12, "stop": ("e",)},
}
PROMPT = "Once upon a time there was a small program, and"


def _progress(job, replies, num_deltas):
    """What a gateway has after some deltas, as it would send it on."""
    samples = [([], None) for _ in range(job.n)]
    cached = 0
    for delta in [reply for reply in replies if isinstance(reply, Delta)][:num_deltas]:
        tokens, _ = samples[delta.index]
        samples[delta.index] = ([*tokens, *delta.token_ids], delta.finish_reason)
        cached = cached if delta.cached_tokens is None else delta.cached_tokens
    return Progress(tuple(SampleProgress(tuple(tokens), finish) for tokens, finish in samples), cached)


@pytest.mark.parametrize("rules", RULES)
def test_from_any_token_on_the_answer_is_the_same(lab, rules) -> None:
    """Deltas before and after the change of engines are, together, the undisturbed ones: text, tokens, logprobs, finish reasons, usage."""
    options = {"max_tokens": 20, **RULES[rules]}
    job = lab.job(PROMPT, **options)
    (whole,) = lab.run(lab.engine(), job)
    deltas = [reply for reply in whole if isinstance(reply, Delta)]
    other = lab.engine()
    for cut in {1, 2, 3, 5, 8, 13, len(deltas) - 1}:
        if cut >= len(deltas):
            continue
        resumed = dataclasses.replace(job, attempt=2, progress=_progress(job, whole, cut))
        (rest,) = lab.run(other, resumed)
        again = [reply for reply in rest if isinstance(reply, Delta)]
        for index in range(job.n):
            expected = [dataclasses.replace(d, cached_tokens=None) for d in deltas if d.index == index]
            got = [d for d in deltas[:cut] if d.index == index] + [d for d in again if d.index == index]
            assert expected == [dataclasses.replace(d, cached_tokens=None) for d in got]
        assert whole[-1] == rest[-1]
        other.check_invariants()
        assert 0 == other.cache.pool.num_held


def test_what_the_first_attempt_found_in_the_cache_is_reported(lab) -> None:
    """Usage tells what the prompt cost when it was begun, whatever the second engine finds."""
    engine = lab.engine()
    lab.run(engine, lab.job(PROMPT * 4))
    job = lab.job(PROMPT * 4)
    (whole,) = lab.run(engine, job)
    assert whole[-1].cached_tokens > 0
    assert whole[1].cached_tokens == whole[-1].cached_tokens
    resumed = dataclasses.replace(job, attempt=2, progress=_progress(job, whole, 5))
    (rest,) = lab.run(lab.engine(), resumed)
    assert whole[-1] == rest[-1]


def test_an_echoed_prompt_is_not_echoed_again(lab) -> None:
    """Prompt logprobs come once: the gateway asks for them again only if it hasn't got them."""
    job = lab.job(PROMPT, echo=1, max_tokens=8)
    (whole,) = lab.run(lab.engine(), job)
    resumed = dataclasses.replace(job, attempt=2, prompt_logprobs=None, progress=_progress(job, whole, 3))
    (rest,) = lab.run(lab.engine(), resumed)
    assert not any(isinstance(reply, PromptLogprobs) for reply in rest)
    assert whole[-1] == rest[-1]


def test_a_finished_answer_ends_at_once(lab) -> None:
    """Nothing is missing but the last word."""
    job = lab.job(PROMPT, max_tokens=4)
    (whole,) = lab.run(lab.engine(), job)
    (rest,) = lab.run(lab.engine(), dataclasses.replace(job, attempt=2, progress=_progress(job, whole, 99)))
    assert isinstance(rest[-1], Done)
    assert whole[-1] == rest[-1]
    assert not any(isinstance(reply, Delta) for reply in rest)


@pytest.mark.parametrize(
    "samples",
    [(), (SampleProgress((1,)), SampleProgress((1,))), (SampleProgress((1,) * 17),), (SampleProgress((1,) * 16),), (SampleProgress((10**6,)),),
     (SampleProgress((-1,)),)],
    ids=["none", "too many", "too long", "long and not ended", "unknown token", "negative token"],
)  # fmt: skip
def test_progress_that_cannot_be_is_refused(lab, samples) -> None:
    """A signed job with an impossible progress gets an error, and the engine goes on."""
    engine = lab.engine()
    job = dataclasses.replace(lab.job(PROMPT, max_tokens=16), attempt=2, progress=Progress(samples))
    (replies,) = lab.run(engine, job)
    assert "invalid_job" == replies[-1].code
    assert not engine.has_work


def test_another_answer_is_not_spliced_on(lab) -> None:
    """A token that this engine would not have chosen ends the request with an error where that's noticed."""
    job = lab.job(PROMPT, max_tokens=16, logprobs=1, stop=("zzzz",))
    (whole,) = lab.run(lab.engine(), job)
    z = lab.ids("z")[0]
    progress = Progress((SampleProgress((*_progress(job, whole, 3).samples[0].token_ids, z)),))
    (rest,) = lab.run(lab.engine(), dataclasses.replace(job, attempt=2, progress=progress))
    assert "internal_error" == rest[-1].code
