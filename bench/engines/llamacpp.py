"""llama.cpp through llama-cpp-python's bindings of its C API: one `llama_batch` holds a token of each stream.

Prompts of all streams go in together, as many tokens at a time as the batch takes, with logits for the last of each only.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as api

from bench.engines.serve import LoadRequest, serve

MAX_BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
_FLASH = {True: api.LLAMA_FLASH_ATTN_TYPE_ENABLED, False: api.LLAMA_FLASH_ATTN_TYPE_DISABLED}


class LlamaCpp:
    """One model; a context of the wanted size for each measurement."""

    def __init__(self) -> None:
        self._context: Any = None
        self._batch: Any = None
        self._waiting: list[tuple[int, int, Sequence[int]]] = []  # stream, first position, tokens
        self._next: dict[int, tuple[int, int]] = {}  # stream: token, its position

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        """Map the file; the kernels are those of this machine."""
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(wanted.model.encode(), parameters)
        if not self._model:
            raise RuntimeError("the model cannot be loaded")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._threads = wanted.threads
        self._flash_attention = bool(wanted.options["flash_attention"])
        return {
            "version": f"llama-cpp-python {api.__version__}",
            "weights": "the file's",
            "kv": "f16",
            "settings": f"{wanted.threads} threads, flash attention {'on' if self._flash_attention else 'off'}, "
            f"batches of {MAX_BATCH_TOKENS} in {MICRO_BATCH_TOKENS}, one KV buffer a stream, weights repacked where it can",
            "kernels": _text(api.llama_print_system_info()),
        }

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        """A fresh context, as large as needed and no larger: attention of llama.cpp reads what is reserved, in steps of 256."""
        self.end()
        parameters = api.llama_context_default_params()
        parameters.n_ctx = num_streams * num_tokens
        parameters.n_batch = MAX_BATCH_TOKENS
        parameters.n_ubatch = MICRO_BATCH_TOKENS
        parameters.n_seq_max = num_streams
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = _FLASH[self._flash_attention]
        parameters.kv_unified = False
        self._context = api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("no context can be made")
        self._batch = api.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Prompts wait for the next steps."""
        self._waiting = [(stream, 0, tokens) for stream, tokens in enumerate(prompts)]

    def step(self) -> list[tuple[int, int]]:
        """A batch of prompt tokens while there are any, then one token of each stream."""
        return self._prefill() if self._waiting else self._decode()

    def end(self) -> None:
        """Free the context."""
        if self._context is not None:
            api.llama_batch_free(self._batch)
            api.llama_free(self._context)
            self._context = None
        self._waiting, self._next = [], {}

    def _prefill(self) -> list[tuple[int, int]]:
        entries: list[tuple[int, int, int, bool]] = []
        while self._waiting and len(entries) < MAX_BATCH_TOKENS:
            stream, first, tokens = self._waiting.pop(0)
            taken = tokens[: MAX_BATCH_TOKENS - len(entries)]
            is_whole = len(taken) == len(tokens)
            for offset, token in enumerate(taken):
                entries.append((stream, token, first + offset, is_whole and offset == len(taken) - 1))
            if not is_whole:
                self._waiting.insert(0, (stream, first + len(taken), tokens[len(taken) :]))
        return self._run(entries)

    def _decode(self) -> list[tuple[int, int]]:
        return self._run([(stream, token, at, True) for stream, (token, at) in self._next.items()])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Decode (stream, token, position, wants logits) and take the likeliest next token of each that wants it."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (stream, token, position, wanted) in enumerate(entries):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = wanted
        if code := api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        produced = []
        for index, (stream, _, position, wanted) in enumerate(entries):
            if wanted:
                token = self._likeliest(index)
                self._next[stream] = (token, position + 1)
                produced.append((stream, token))
        return produced

    def _likeliest(self, index: int) -> int:
        import numpy as np

        logits = api.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


def _text(raw: bytes | ctypes.c_char_p) -> str:
    return (raw if isinstance(raw, bytes) else raw.value or b"").decode("utf-8", "replace").strip()


if __name__ == "__main__":
    serve(LlamaCpp())
