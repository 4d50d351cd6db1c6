"""Scales of an FP8 KV cache: which ones a worker uses, and the file beside a model that calibrated ones are kept in.

They come from the checkpoint, from `sluicegate calibrate`, or are 1. Never from what is served: whose request came first would decide what others get.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kernels.kv_layout import KvLayout
from worker.model.errors import ModelError

FILE = "kv_scales.safetensors"
_FORMAT = "sluicegate-kv-scales-1"
_NAMES = ("k_scale", "v_scale")
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class KvScales:
    """float32 [num_layers, num_kv_heads] each. `origin` says where they come from: 1, checkpoint or calibrated."""

    k: torch.Tensor
    v: torch.Tensor
    origin: str

    @classmethod
    def ones(cls, layout: KvLayout) -> "KvScales":
        """Scales that change nothing."""
        shape = (layout.num_layers, layout.num_kv_heads)
        return cls(torch.ones(shape), torch.ones(shape), "1")

    @property
    def fingerprint(self) -> str:
        """Equal for equal numbers only: pages written under other scales hold other values for the same bytes."""
        if bool((self.k == 1).all()) and bool((self.v == 1).all()):
            return "1.0"
        content = b"".join(scale.contiguous().numpy().tobytes() for scale in (self.k, self.v))
        return hashlib.sha256(content).hexdigest()[:32]


def default_file(model: Path) -> Path:
    """Where a model's calibrated scales lie: beside its folder or file. In a folder, other engines would take the file for weights."""
    whole = model.resolve()
    return whole.with_name(f"{whole.name}.{FILE}")


def choose(choice: str, model: Path, digest: str, layout: KvLayout, stored: KvScales | None) -> KvScales:
    """The scales to use by `--kv-scales`: 1, checkpoint, auto, or a file. `stored` are the checkpoint's. Raises ModelError.

    `auto` takes the calibrated file beside the model, else the checkpoint's scales, else 1.
    """
    if layout.dtype != "fp8":
        if choice not in {"auto", "1"}:
            raise ModelError(f"kv_scales {choice!r}: only an fp8 KV cache has scales, this one is {layout.dtype}")
        return KvScales.ones(layout)
    if choice == "1":
        return KvScales.ones(layout)
    if choice == "checkpoint":
        if stored is None:
            raise ModelError(f"{model}: has no KV scales")
        return stored
    if choice != "auto":
        return read(Path(choice), digest, layout)
    beside = default_file(model)
    if beside.exists():
        return read(beside, digest, layout)
    return stored or KvScales.ones(layout)


def write(path: Path, scales: KvScales, digest: str, facts: dict[str, str]) -> None:
    """Store calibrated scales for the model of this digest; `facts` tell how they were made."""
    metadata = {**facts, "format": _FORMAT, "model_digest": digest}
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(save({"k_scale": scales.k.contiguous(), "v_scale": scales.v.contiguous()}, metadata))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path, digest: str, layout: KvLayout) -> KvScales:
    """Scales for the model of this digest. Raises ModelError for a file that isn't one, or is another model's."""
    if not path.is_file():
        raise ModelError(f"{path}: no such file of KV scales; `sluicegate calibrate` makes one")
    if path.stat().st_size > _MAX_BYTES:
        raise ModelError(f"{path}: is too large for KV scales")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            if metadata.get("format") != _FORMAT or names != set(_NAMES):
                raise ModelError(f"{path}: is no file of KV scales")
            tensors = [file.get_tensor(name) for name in _NAMES]
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if metadata.get("model_digest") != digest:
        raise ModelError(
            f"{path}: its scales are for another model (sha256 {metadata.get('model_digest', '')[:12]}..., this one's is {digest[:12]}...)"
        )
    for name, scale in zip(_NAMES, tensors, strict=True):
        check(scale, f"{path}: tensor {name!r}", layout)
    return KvScales(tensors[0], tensors[1], "calibrated")


def check(scale: torch.Tensor, source: str, layout: KvLayout) -> None:
    """Raise ModelError for scales of the wrong shape or type, or that are not usable numbers."""
    shape = (layout.num_layers, layout.num_kv_heads)
    if tuple(scale.shape) != shape or scale.dtype is not torch.float32:
        raise ModelError(f"{source} must be float32 {list(shape)}, got {scale.dtype} {list(scale.shape)}")
    if not bool((torch.isfinite(scale) & (scale > 1e-30)).all()):
        raise ModelError(f"{source} must hold positive finite numbers")
