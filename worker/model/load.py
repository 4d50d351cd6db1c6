"""From a path to a model that can serve."""

from dataclasses import dataclass
from pathlib import Path

from kernels.backend import Backend
from kernels.kv_pool import KvDtype, KvLayout
from protocol.model_card import TokenizerSpec
from worker.kv_scales import KvScales
from worker.model.architectures import architecture
from worker.model.checkpoint import Checkpoint
from worker.model.config import ModelConfig
from worker.model.errors import ModelError
from worker.model.folder import refuse_pickle
from worker.model.gguf_file import open_gguf
from worker.model.heap import release_free_memory
from worker.model.model import Model
from worker.model.safetensors_file import open_folder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, with what came along in its files. `digest` is a hex sha256 over them; `backend` computes with it."""

    model: Model
    config: ModelConfig
    tokenizer: TokenizerSpec
    digest: str
    backend: Backend
    kv_scales: KvScales | None = None

    def kv_layout(self, num_pages: int, page_size: int, dtype: KvDtype) -> KvLayout:
        """The layout of a KV pool for this model."""
        return self.model.kv_layout(num_pages, page_size, dtype)


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, or a folder in Hugging Face's layout. Raises ModelError."""
    if path.is_dir():
        return open_folder(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder")
    if not path.is_file():  # reading a pipe would wait for ever
        raise ModelError(f"{path}: is no regular file")
    refuse_pickle(path)
    return open_gguf(path)


def load_model(path: Path, backend: Backend) -> LoadedModel:
    """Load all weights; every tensor of the checkpoint is used exactly once. Raises ModelError, and torch.OutOfMemoryError on a GPU that's too small.

    For a GPU each matrix is brought there before the next one is read.
    """
    loaded = _load(path, backend)
    release_free_memory()
    return loaded


def _load(path: Path, backend: Backend) -> LoadedModel:
    checkpoint = open_checkpoint(path)
    checkpoint.digest.start()
    try:
        model = architecture(checkpoint.config.architecture, checkpoint.label).build(checkpoint, backend)
        scales = checkpoint.kv_scales()
        checkpoint.finish()
        digest = checkpoint.digest.result()
        return LoadedModel(model, checkpoint.config, checkpoint.tokenizer, digest, backend, scales)
    finally:
        checkpoint.digest.stop()
