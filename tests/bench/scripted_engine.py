"""An engine without a model, for tests of the protocol: stream s produces s, s + 10, s + 20, ... ; run with a mode as argument."""

import os
import sys
import time
from collections.abc import Sequence

from bench.engines.serve import LoadRequest, serve


class Scripted:
    """Counts; fails as its mode says."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._lengths: list[int] = []

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        print("what a library prints is no answer")
        if self._mode == "no load":
            raise RuntimeError("out of luck")
        if self._mode == "dies":
            print("terrible things", file=sys.stderr, flush=True)
            os._exit(3)
        if self._mode == "hangs":
            time.sleep(60)
        return {"kv": "none", "threads": str(wanted.threads)}

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        self._room = num_tokens

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        self._lengths = [0 for _ in prompts]
        assert self._room == max(map(len, prompts)) + num_new

    def step(self) -> list[tuple[int, int]]:
        if self._mode == "no step" and self._lengths[0] == 3:
            raise RuntimeError("no more")
        produced = [(stream, stream + 10 * length) for stream, length in enumerate(self._lengths)]
        self._lengths = [length + 1 for length in self._lengths]
        return produced

    def end(self) -> None:
        self._lengths = []


if __name__ == "__main__":
    serve(Scripted(sys.argv[1]))
