"""The tokens of the synthetic model: all bytes, so that it can read anything, and made-up words, so that nobody takes its answers for real."""

from protocol.model_card import TokenizerSpec
from worker.model.token_bytes import byte_level_alphabet
from worker.model.tokenizer_json import byte_level_bpe

_CONSONANTS, _VOWELS = "bdfklmnprstvz", "aeiou"
NUM_WORDS = 512
NUM_BYTES = 256
_CONTROL = ("<|start|>", "<|stop|>")
_SPACE = "\u0120"  # a space in byte-level tokenizers
_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|stop|>\n{% endfor %}"
    "<|start|>assistant\n"
)

FIRST_WORD_ID = NUM_BYTES
EOS_ID = NUM_BYTES + NUM_WORDS + 1
VOCAB_SIZE = NUM_BYTES + NUM_WORDS + len(_CONTROL)


def tokenizer_spec() -> TokenizerSpec:
    """Text in words of this vocabulary is a token a word; all other text is a token a byte."""
    tokens = [character for character, _ in sorted(byte_level_alphabet().items(), key=lambda item: item[1])]
    tokens += [_SPACE + _word(number) for number in range(NUM_WORDS)]
    first_control = len(tokens)
    return TokenizerSpec(
        tokenizer_json=byte_level_bpe([*tokens, *_CONTROL], (), "llama3", excluded=set(_CONTROL)),
        control_tokens=tuple((text, first_control + place) for place, text in enumerate(_CONTROL)),
        chat_template=_TEMPLATE,
        bos_token_id=None,
        add_bos=False,
        eos_token_ids=(EOS_ID,),
        vocab_size=VOCAB_SIZE,
    )


def _word(number: int) -> str:
    """Two syllables, and for some numbers the end of a sentence."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    first, second = number % len(syllables), (number * 7 + number // len(syllables)) % len(syllables)
    return syllables[first] + syllables[second] + ("." if number % 8 == 7 else "")
