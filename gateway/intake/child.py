"""The intake process: reads frames from standard input, answers on standard output, ends with its input.

["load", card digest, encoded TokenizerSpec]          -> ["ok"]
[kind, body, [field of a ServedModel...]..., limits]  -> ["call", encoded GenerationCall]
                                                       | ["error", status, message, type, code, param]
                                                       | ["need", card digest]
"""

import os
import resource
import signal
import sys
from collections import OrderedDict
from typing import Any

from gateway.errors import ApiError, bad_request, crashed, unavailable
from gateway.intake.build import build_call
from gateway.intake.call import IntakeLimits, ServedModel
from gateway.intake.encoder import PromptEncoder
from gateway.intake.wire import frame, read_frame
from gateway.memory import LARGE_BYTES, keep_heap_small, trim
from protocol.codec import decode, encode
from protocol.model_card import TokenizerSpec

MAX_MEMORY_BYTES = 2 * 1024**3  # of address space: a template that builds a huge string fails alone
MAX_LOADED = 8
MAX_REQUEST_S = 120


class _NeedCard(Exception):
    """A tokenizer is not here yet."""


class Intake:
    """Answers requests; keeps the tokenizers that it was given."""

    def __init__(self) -> None:
        self._encoders: OrderedDict[str, PromptEncoder] = OrderedDict()

    def answer(self, request: list[Any]) -> list[Any]:
        """One request's answer; never raises for anything that a client or a model can cause."""
        try:
            if request[0] == "load":
                self._load(request[1], request[2])
                return ["ok"]
            kind, body, models, limits = request
            served = {row[0]: ServedModel(*row) for row in models}
            return ["call", encode(build_call(kind, body, served, IntakeLimits(*limits), self._encoder))]
        except _NeedCard as need:
            return ["need", str(need)]
        except ApiError as error:
            return _error(error)
        except MemoryError:
            return _error(bad_request("The request needs too much memory to be prepared."))
        except Exception as error:  # not shown: its text may hold a prompt
            print(f"intake: {type(error).__name__}", file=sys.stderr, flush=True)
            return _error(crashed())

    def _load(self, digest: str, raw: bytes) -> None:
        try:
            self._encoders[digest] = PromptEncoder(decode(TokenizerSpec, raw))
        except ApiError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exceptions
            raise unavailable(f"The model's tokenizer cannot be used: {type(error).__name__}.") from None
        while len(self._encoders) > MAX_LOADED:
            self._encoders.popitem(last=False)

    def _encoder(self, model: ServedModel) -> PromptEncoder:
        found = self._encoders.get(model.card_digest)
        if found is None:
            raise _NeedCard(model.card_digest)
        self._encoders.move_to_end(model.card_digest)
        return found


def _error(error: ApiError) -> list[Any]:
    return ["error", error.status, error.message, error.type, error.code, error.param]


def main() -> None:
    """Serve until standard input ends."""
    # The gateway decides when to stop; a terminal's Ctrl-C is not for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keep_heap_small()
    intake, stdin, stdout = Intake(), sys.stdin.buffer, sys.stdout.buffer
    while (request := read_frame(stdin)) is not None:
        # The gateway kills us long before; this is for a loop that outlives a gateway which was itself killed.
        signal.alarm(MAX_REQUEST_S)
        answer = intake.answer(request)
        signal.alarm(0)
        is_large = len(request[1]) > LARGE_BYTES
        del request
        stdout.write(frame(answer))
        stdout.flush()
        del answer
        if is_large:
            trim()


if __name__ == "__main__":
    main()
