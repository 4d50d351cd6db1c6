"""OpenVINO GenAI: its continuous-batching pipeline, which reads the same GGUF file and is driven step by step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.engines.serve import LoadRequest, serve

CACHE_GIB = 1


class OpenVino:
    """One pipeline; requests are dropped from it after each measurement."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._num_requests = 0

    def load(self, wanted: LoadRequest) -> dict[str, str]:
        """Convert the file in memory and compile it for the CPU."""
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_seqs = wanted.max_streams
        scheduler.max_num_batched_tokens = wanted.options["max_batched_tokens"]
        properties = {
            "INFERENCE_NUM_THREADS": wanted.threads,
            "PERFORMANCE_HINT": "LATENCY",
            **wanted.options["properties"],
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(wanted.model, scheduler, "CPU", properties)
        shown = ", ".join(f"{key}={value}" for key, value in properties.items())
        return {
            "version": f"openvino-genai {openvino_genai.__version__}",
            "weights": "the file's",
            "kv": str(wanted.options["properties"].get("KV_CACHE_PRECISION", "u8 (its default)")),
            "settings": f"{shown}, {scheduler.max_num_batched_tokens} tokens a step",
        }

    def prepare(self, num_streams: int, num_tokens: int) -> None:
        """The cache is there already."""

    def submit(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        """Add one request for each prompt."""
        sampling = openvino_genai.GenerationConfig()
        sampling.max_new_tokens = num_new
        sampling.ignore_eos = True
        sampling.do_sample = False
        for tokens in prompts:
            ids = openvino.Tensor(np.array([tokens], dtype=np.int64))
            self._handles.append(self._pipeline.add_request(self._num_requests, ids, sampling))
            self._num_requests += 1

    def step(self) -> list[tuple[int, int]]:
        """One step of the pipeline, and what it left to read."""
        self._pipeline.step()
        produced = []
        for stream, handle in enumerate(self._handles):
            while handle.can_read():
                for output in handle.read().values():
                    produced += [(stream, int(token)) for token in output.generated_ids]
        return produced

    def end(self) -> None:
        """Cancel what runs, and let the pipeline notice."""
        for handle in self._handles:
            handle.cancel()
        self._handles = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


if __name__ == "__main__":
    serve(OpenVino())
