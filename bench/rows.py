"""What is measured: the rows of the table. One definition for all engines."""

from dataclasses import dataclass

DECODE_STEPS = 16
# Prompt tokens of each of several streams; what a stream reads of its own cache is small beside the weights then.
MANY_CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Row:
    """`num_streams` prompts of `context` tokens each.

    A prefill row times until the first token, anew each round. A decode row computes the prompts once and then times
    `num_steps` tokens of each stream a round, all streams running: the context grows by that much.
    """

    num_streams: int
    context: int
    num_steps: int
    rounds: int

    @property
    def is_prefill(self) -> bool:
        """Whether the prompt is what is timed."""
        return self.num_steps == 0

    @property
    def name(self) -> str:
        """A short name without spaces."""
        if self.is_prefill:
            return f"prefill-{self.context}"
        return f"decode-{self.num_streams}x{self.context}"

    @property
    def title(self) -> str:
        """For people."""
        if self.is_prefill:
            return f"prefill of {self.context:,} tokens"
        streams = "1 stream" if self.num_streams == 1 else f"{self.num_streams} streams together"
        return f"decode, {streams} at {self.context:,}"

    @property
    def num_new(self) -> int:
        """Tokens that each stream may produce: those timed, the first one, and some to spare, so that no stream ends early."""
        return self.num_steps * (self.rounds + 1) + 8


def prefill(context: int, rounds: int) -> Row:
    """Time of one prompt."""
    return Row(1, context, 0, rounds)


def decode(num_streams: int, context: int, rounds: int = 5, num_steps: int = DECODE_STEPS) -> Row:
    """Time of tokens that follow prompts."""
    return Row(num_streams, context, num_steps, rounds)


ROWS = (
    decode(1, 512),
    prefill(512, 5),
    prefill(1000, 3),
    prefill(2048, 3),
    prefill(4096, 2),
    decode(1, 128),
    decode(1, 1000),
    decode(1, 4000),
    decode(1, 8000),
    decode(8, MANY_CONTEXT),
    decode(16, MANY_CONTEXT),
    decode(32, MANY_CONTEXT),
)

# A minute's worth: the rows that a change of the kernels moves most.
QUICK_ROWS = (decode(1, 512, 3), prefill(512, 3), decode(8, MANY_CONTEXT, 3), decode(32, MANY_CONTEXT, 3))

# Not a measurement: exercises every path in seconds.
TINY_ROWS = (prefill(24, 2), decode(1, 24, 2, 2), decode(3, 16, 2, 2))

SETS = {"full": ROWS, "quick": QUICK_ROWS, "tiny": TINY_ROWS}


def longest(rows: tuple[Row, ...]) -> int:
    """Tokens of the longest stream, prompt and answer."""
    return max(row.context + row.num_new for row in rows)


def most_tokens(rows: tuple[Row, ...]) -> int:
    """Tokens that a KV cache must hold at once."""
    return max(row.num_streams * (row.context + row.num_new) for row in rows)


def most_streams(rows: tuple[Row, ...]) -> int:
    """Streams that run at once."""
    return max(row.num_streams for row in rows)
