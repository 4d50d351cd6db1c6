"""Going on with an answer that another worker began: the sequence is put into the state that it had when its last token was delivered.

Everything but the KV cache is a function of prompt, tokens and rules: penalties and randomness are counted on by the sampler, the text
stream is fed again and what comes out of it dropped, since the client has it. The KV cache is computed like a preempted sequence's.
"""

from protocol.job import Job, SampleProgress
from protocol.replies import TokenLogprob
from worker.sequence import Sequence, State
from worker.text import TextStream

_UNKNOWN = TokenLogprob(0, b"", 0.0)


def progress_problem(job: Job, vocab_size: int) -> str | None:
    """Why an answer can't go on from where it's said to be."""
    if job.progress is None:
        return None
    if len(job.progress.samples) != job.n:
        return "the progress is not one for each sample"
    for sample in job.progress.samples:
        tokens = sample.token_ids
        if len(tokens) > job.sampling.max_tokens or (
            len(tokens) == job.sampling.max_tokens and sample.finish_reason is None
        ):
            return "the progress has more tokens than were asked for"
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            return "the progress has token ids outside the vocabulary"
    return None


def take_up(sequence: Sequence, progress: SampleProgress, scratch: TextStream) -> None:
    """Set a new sequence to where its sample was. `scratch` is another text stream of the same rules.

    Logprobs of tokens whose text was still held back have not been delivered: these last tokens are computed once more.
    """
    tokens = list(progress.token_ids)
    if progress.finish_reason is not None:
        sequence.tokens.extend(tokens)
        sequence.finish_reason = progress.finish_reason
        sequence.state = State.FINISHED
        return
    num_taken = len(tokens)
    if sequence.request.job.sampling.logprobs is not None:
        for token in tokens:
            scratch.push(token, _UNKNOWN, ends_text=False, is_full=False)
        num_taken -= scratch.num_held_entries
    for token in tokens[:num_taken]:
        sequence.tokens.append(token)
        sequence.sampler.observe(token)
        sequence.text.push(token, None, ends_text=False, is_full=False)
    sequence.repeated.extend(tokens[num_taken:])
