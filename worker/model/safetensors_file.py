"""A folder in Hugging Face's layout (config.json, *.safetensors, tokenizer.json) as a checkpoint."""

from functools import partial
from pathlib import Path

from worker.model.architectures import folder_config
from worker.model.checkpoint import Checkpoint
from worker.model.digest import folder_digest
from worker.model.errors import ModelError
from worker.model.folder import inside, read_json, refuse_pickle
from worker.model.folder_tokenizer import tokenizer_from_folder
from worker.model.quantization_config import quantization
from worker.model.stored_weights import StoredWeights
from worker.model.tensor_files import TensorFiles

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def open_folder(folder: Path) -> Checkpoint:
    """Read configuration and tokenizer, and check that all shards are there. Raises ModelError."""
    raw = read_json(folder, "config.json")
    label = str(folder / "config.json")
    found, config = folder_config(raw, label)
    paths, index = _files(folder)
    ignored = frozenset({found.tensor_name("head", None)} if config.tie_embeddings else ())
    rotary = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    weights = StoredWeights(TensorFiles(folder, paths, index), quantization(raw, label))
    return Checkpoint(
        config=config,
        tokenizer=tokenizer_from_folder(folder, config.vocab_size, raw),
        source=weights,
        tensor_name=found.tensor_name,
        digest=folder_digest([folder / "config.json", folder / "tokenizer.json", *paths]),
        label=str(folder),
        ignored=ignored | rotary,
        ignored_prefixes=found.ignored(config),
        kv_scales=partial(weights.kv_scales, config.num_layers, config.num_kv_heads),
    )


def _files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    if (folder / _INDEX).exists():
        index = read_json(folder, _INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()) or not index:
            raise ModelError(f"{folder / _INDEX}: has no weight_map")
        paths = [inside(folder, name) for name in sorted(set(index.values()))]
        for path in paths:
            refuse_pickle(path)
            if not path.is_file():
                raise ModelError(f"{path}: is in the index, but not in the folder")
        return paths, index
    single = inside(folder, _SINGLE)
    if not single.is_file():
        for path in sorted(folder.iterdir()):
            refuse_pickle(path)
        raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
    return [single], None
