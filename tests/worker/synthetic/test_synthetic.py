"""The synthetic engine: text that is a function of the request, under the same rules as a model's."""

import math
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from protocol.replies import Delta, Done, Failed, PromptLogprobs
from worker.errors import SettingsError
from worker.model.token_bytes import token_bytes
from worker.settings import SyntheticSettings
from worker.synthetic import executor
from worker.synthetic.vocabulary import EOS_ID, VOCAB_SIZE, tokenizer_spec


def test_a_worker_without_a_model_loads_no_torch() -> None:
    """A whole engine is made and answers in a process of its own."""
    code = (
        "import sys, worker.process, sluicegate.processes\n"
        "from worker.settings import SyntheticSettings, WorkerSettings\n"
        "prepared = worker.process._preparation(WorkerSettings('', None, 'm', b'j' * 32, b'n' * 32, synthetic=SyntheticSettings()))()\n"
        "from protocol.job import Job, SamplingParams\n"
        "prepared.engine.submit(Job('r', 'g', 't', 'm', (1, 2), SamplingParams(4, 1, logprobs=2), 0, 2**60))\n"
        "while prepared.engine.has_work: prepared.engine.step()\n"
        "print(prepared.engine.totals.generated_tokens, [m for m in ('torch', 'triton', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "4 []" == result.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "presence_penalty": 1.5, "logprobs": 3}]
)
def test_tokens_depend_on_the_request_alone(lab, tokens_of, options) -> None:
    """Alone, in a batch with a pool that is too small, cold or cached, in one chunk or in many: the same tokens."""
    prompt = tuple(range(40))
    (alone,) = lab.run(lab.engine(), lab.job(prompt, max_tokens=60, ignore_eos=True, **options))
    crowd = lab.engine(kv_tokens=256, page_size=16, step_tokens=32)
    others = [
        lab.job((number, 7, 9), max_tokens=50, ignore_eos=True, temperature=0.5, seed=number) for number in range(9)
    ]
    _, again, *_ = lab.run(crowd, others[0], lab.job(prompt, max_tokens=60, ignore_eos=True, **options), *others[1:])
    assert crowd.scheduler.num_preemptions > 0
    assert 60 == len(tokens_of(alone))
    assert tokens_of(alone) == tokens_of(again)


def test_greedy_answers_do_not_depend_on_the_seed(lab, tokens_of) -> None:
    """A client that gives no seed gets one drawn by the gateway; temperature 0 must be the same for all of them."""
    first, second, third = lab.run(lab.engine(), lab.job(seed=1), lab.job(seed=2), lab.job((1, 2, 3)))
    assert tokens_of(first) == tokens_of(second)
    assert tokens_of(first) != tokens_of(third)


def test_plain_greedy_is_what_the_sampler_would_choose(lab, tokens_of) -> None:
    """The short way round the row of logits leads to the same token."""
    short, long = lab.run(lab.engine(), lab.job(max_tokens=40), lab.job(max_tokens=40, logprobs=0))
    assert tokens_of(short) == tokens_of(long)


def test_samples_and_seeds_differ(lab, tokens_of) -> None:
    """n samples at temperature 1 go different ways, and so do seeds."""
    first, second = lab.run(lab.engine(), lab.job(n=2, temperature=1.0), lab.job(temperature=1.0, seed=2))
    assert 3 == len({tuple(tokens_of(first, 0)), tuple(tokens_of(first, 1)), tuple(tokens_of(second))})


def test_logprobs_are_those_of_a_distribution(lab) -> None:
    """Over the whole vocabulary they add up to one; echoed prompts have theirs too."""
    (replies,) = lab.run(lab.engine(), lab.job(max_tokens=3, logprobs=VOCAB_SIZE, echo=VOCAB_SIZE))
    entries = [entry for reply in replies if isinstance(reply, Delta) for entry in reply.logprobs]
    prompt = [entry for reply in replies if isinstance(reply, PromptLogprobs) for entry in reply.entries]
    assert 3 == len(entries)
    assert [None] == [entry for entry in prompt if entry is None]
    for entry in entries + prompt[1:]:
        assert math.isclose(1.0, sum(math.exp(logprob) for _, _, logprob in entry.top), rel_tol=1e-6)


def test_an_answer_ends_by_itself_where_it_may(lab, tokens_of) -> None:
    """EOS comes after some words; ignore_eos and min_tokens keep it away."""
    free, ignoring, late = lab.run(
        lab.engine(),
        lab.job(max_tokens=200),
        lab.job(max_tokens=200, ignore_eos=True),
        lab.job(max_tokens=200, min_tokens=150),
    )
    assert EOS_ID == tokens_of(free)[-1]
    assert 16 < len(tokens_of(free)) < 100
    assert 200 == len(tokens_of(ignoring))
    assert EOS_ID not in tokens_of(ignoring)
    assert 150 < len(tokens_of(late)) < 200
    assert isinstance(free[-1], Done)


def test_a_stop_string_ends_the_text(lab) -> None:
    """It and what follows it are not shown."""
    (whole,) = lab.run(lab.engine(), lab.job())
    text = "".join(reply.text for reply in whole if isinstance(reply, Delta))
    word = text.split()[5]
    (stopped,) = lab.run(lab.engine(), lab.job(stop=(word,)))
    assert text[: text.index(word)] == "".join(reply.text for reply in stopped if isinstance(reply, Delta))


def test_cancel_and_deadline(lab) -> None:
    """Both end the request and free its pages."""
    engine = lab.engine()
    cancelled, late = lab.job(max_tokens=2000), lab.job(deadline_ms=1)
    engine.submit(cancelled)
    engine.step()
    engine.submit(late)
    engine.cancel(cancelled.request_id)
    ends = [outgoing.envelope.reply for outgoing in engine.step() if isinstance(outgoing.envelope.reply, Failed)]
    assert ["cancelled", "deadline_exceeded"] == [end.code for end in ends]
    assert not engine.has_work
    assert 0 == engine.cache.pool.num_held


def test_the_context_limit_holds(lab) -> None:
    """A job over the limit is refused by the worker too."""
    (fits, over) = lab.run(lab.engine(context=32), lab.job(max_tokens=30), lab.job(max_tokens=31))
    assert isinstance(fits[-1], Done)
    assert "invalid_job" == over[-1].code


@pytest.mark.parametrize("text", ["plain", "Zürich 龜 🫠\n\t", " pofe savo", "", "a\x00b"])
def test_any_text_goes_through_the_tokenizer(text: str) -> None:
    """Its tokens' bytes are the text's."""
    spec = tokenizer_spec()
    table = token_bytes(spec)
    ids = Tokenizer.from_str(spec.tokenizer_json).encode(text, add_special_tokens=False).ids
    assert text.encode() == b"".join(table[token] for token in ids)
    assert VOCAB_SIZE == len(table)


def test_steps_take_the_time_of_their_rates(lab, monkeypatch) -> None:
    """8 prompt tokens at 100 a second, then 3 steps at 10 a second, on one timetable."""
    clock, waits = [100.0], []
    monkeypatch.setattr(executor.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        waits.append(round(seconds, 6))
        clock[0] += seconds + 0.001  # the scheduler's part, which the next step must make up for

    monkeypatch.setattr(executor.time, "sleep", sleep)
    settings = lab.settings(SyntheticSettings(prefill_rate=100.0, decode_rate=10.0), integrity="off", stall_s=30.0)
    engine = executor.SyntheticExecutor(settings.synthetic, 64, 16)
    made = lab.engine()
    made._parts = made._parts.__class__(
        **{name: getattr(made._parts, name) for name in made._parts.__slots__} | {"executor": engine}
    )
    lab.run(made, lab.job(tuple(range(8)), max_tokens=4))
    assert [0.08, 0.099, 0.099, 0.099] == waits


@pytest.mark.parametrize(
    "change", [{"prefill_rate": -1.0}, {"decode_rate": 0.01}, {"decode_rate": float("nan")}, {"context_length": 1}]
)
def test_a_rate_or_limit_that_cannot_work_is_named(change) -> None:
    """Before anything starts."""
    with pytest.raises(SettingsError, match=next(iter(change))):
        SyntheticSettings(**change)


def test_a_step_must_not_look_like_a_stall(lab) -> None:
    """A prompt's chunk at a very low rate would take longer than the engine may be silent."""
    with pytest.raises(SettingsError, match="prefill_rate"):
        lab.settings(SyntheticSettings(prefill_rate=1.0))
