"""Which token comes where: a function of the prompt, the seed and the place, whatever worker, batch or attempt it is asked in.

Each place has a row of logits in which one token, the favourite, stands out; the sampler does the rest. A greedy answer consists of
favourites and so doesn't depend on the seed.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from protocol.ids import RequestId
from worker.sampling.row import SamplerRow
from worker.sequence import Sequence as Sample
from worker.synthetic.vocabulary import EOS_ID, FIRST_WORD_ID, NUM_WORDS, VOCAB_SIZE

_MASK = (1 << 64) - 1
_NUM_ROWS = 256
_WORD_RANGE, _FAVOURITE, _RARE = 4.0, 8.0, -30.0
_MIN_ANSWER, _ANSWER_RANGE = 16, 48
_MAX_KEYS = 4096

Logits = npt.NDArray[np.float32]


class Script:
    """Rows of logits, and the favourite of each."""

    def __init__(self) -> None:
        self._rows = _random_rows()
        # Only a memory: what falls out is computed again.
        self._keys: OrderedDict[RequestId, int] = OrderedDict()

    def favourite(self, sample: Sample, position: int) -> int:
        """The likeliest token at a place of the answer."""
        key = self._key(sample)
        ends = position >= _MIN_ANSWER + key % _ANSWER_RANGE and sample.sampler.ends_with(EOS_ID)
        return EOS_ID if ends else FIRST_WORD_ID + _mix(key + position) % NUM_WORDS

    def logits(self, sample: Sample, position: int) -> Logits:
        """The row at a place of the answer, or, for negative places, of the prompt; float32 [V]."""
        row: Logits = self._rows[_mix(self._key(sample) ^ position & _MASK) % _NUM_ROWS].copy()
        row[self.favourite(sample, position)] = _FAVOURITE
        return row

    def _key(self, sample: Sample) -> int:
        """A number for the prompt."""
        request_id = sample.request.job.request_id
        found = self._keys.get(request_id)
        if found is None:
            found = self._keys[request_id] = _digest(sample.request.job.prompt_token_ids)
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)
        return found


def is_plain(row: SamplerRow) -> bool:
    """Whether the favourite is what the sampler would choose, so that nobody need look at the row."""
    params = row.params
    return (
        row.is_greedy
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1.0
        and not (params.presence_penalty or params.frequency_penalty)
        and row.num_output >= params.min_tokens
    )


def _digest(token_ids: Sequence[int]) -> int:
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _mix(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): neighbours become strangers."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31


def _random_rows() -> Logits:
    """Words have any logit of a range, bytes and control tokens next to no chance. From a hash: the same in every version of numpy."""
    raw = hashlib.shake_256(b"sluicegate synthetic rows 1").digest(2 * _NUM_ROWS * NUM_WORDS)
    words = np.frombuffer(raw, dtype="<u2").reshape(_NUM_ROWS, NUM_WORDS).astype(np.float32)
    rows = np.full((_NUM_ROWS, VOCAB_SIZE), _RARE, dtype=np.float32)
    rows[:, FIRST_WORD_ID : FIRST_WORD_ID + NUM_WORDS] = words * (_WORD_RANGE / 65536)
    return rows
