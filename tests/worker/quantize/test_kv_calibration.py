"""Calibrated scales of an FP8 KV cache, and a worker that uses them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.comparison import Comparison, logits_of
from kernels.backend import resolve
from kernels.kv_pool import E4M3_MAX, KvPool
from protocol.ids import ModelName
from worker.kv_scales import KvScales, default_file, write
from worker.model.errors import ModelError
from worker.model.load import LoadedModel, load_model
from worker.model_engine import preparation
from worker.quantize.errors import QuantizeError
from worker.quantize.kv_calibration import HEADROOM, calibrated_kv_scales
from worker.quantize.window_run import PAGE_SIZE, run_window
from worker.quantize.windows import calibration_windows
from worker.settings import WorkerSettings

Make = Callable[..., Path]


def _scales(loaded: LoadedModel) -> tuple[KvScales, list[list[int]]]:
    windows = calibration_windows(loaded.tokenizer, 1536).tolist()
    return KvScales(*calibrated_kv_scales(loaded, windows[:2], lambda more: None), "calibrated"), windows


def test_scales_leave_room_and_help(make_folder: Make) -> None:
    """Twice what was seen fits. Keys of 3,000 and values of 0.003, which 1 can't serve, come close to 16 bits."""
    folder = make_folder(max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "k_proj" in name:
            tensors[name] *= 1000
        if "q_proj" in name:
            tensors[name] /= 1000
        if "v_proj" in name:
            tensors[name] /= 1000
        if "o_proj" in name:
            tensors[name] *= 1000
    save_file(tensors, folder / "model.safetensors")
    loaded = load_model(folder, resolve("cpu"))
    scales, windows = _scales(loaded)

    pool = KvPool.allocate(loaded.kv_layout(512 // PAGE_SIZE, PAGE_SIZE, "bf16"))
    for window in windows[:2]:
        run_window(loaded.model, pool, window)
        for stored, scale in ((pool.k, scales.k), (pool.v, scales.v)):
            largest = stored.float().abs().amax(dim=(1, 3, 4))
            assert bool((largest * HEADROOM <= scale * E4M3_MAX * (1 + 1e-6)).all())
    expected = logits_of(loaded, windows[2], "fp16")
    entries = []
    for title, used in (("1", None), ("calibrated", scales)):
        entry = Comparison(title)
        entry.add(logits_of(loaded, windows[2], "fp8", used)[:-1], expected[:-1], torch.tensor(windows[2][1:]))
        entries.append(entry)
    assert 0 < entries[1].mean_divergence < 0.1 * entries[0].mean_divergence


def test_scaling_everything_by_two_changes_no_bit(make_folder: Make) -> None:
    """Scales are applied on both sides, to the head that they are for: powers of two that differ by head give the logits of scale 1."""
    loaded = load_model(make_folder(), resolve("cpu"))
    layout = loaded.kv_layout(1, 1, "fp8")
    window = calibration_windows(loaded.tokenizer, 512)[0, :200].tolist()
    heads = torch.arange(layout.num_layers * layout.num_kv_heads).view(layout.num_layers, layout.num_kv_heads)
    base = KvScales(torch.full(heads.shape, 2.0**-4), torch.full(heads.shape, 2.0**-4), "x")
    spread = KvScales(base.k * 2.0 ** -(heads % 2).float(), base.v * 2.0 ** -((heads + 1) % 3).float(), "x")
    swapped = KvScales(spread.k * 64, spread.v / 64, "x")
    plain, apart, wrong = (logits_of(loaded, window, "fp8", scales) for scales in (base, spread, swapped))
    # Subnormal codes may round otherwise, so it's nearly no bit.
    assert torch.allclose(plain, apart, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
    assert not torch.allclose(plain, wrong, rtol=1e-2, atol=1e-2 * float(plain.abs().max()))


def test_a_context_shorter_than_a_window_is_told(make_folder: Make) -> None:
    """Not run into by a kernel."""
    loaded = load_model(make_folder(max_position_embeddings=256), resolve("cpu"))
    with pytest.raises(QuantizeError, match="windows of 512 tokens, the model's context is 256"):
        _scales(loaded)


def _settings(folder: Path, **options: str) -> WorkerSettings:
    return WorkerSettings(
        redis_url="redis://127.0.0.1:1", model_path=folder, model_name=ModelName("m"), job_signing_key=b"k" * 32,
        namespace_secret=b"n" * 32, kv_dtype="fp8", kv_tokens=256, **options,
    )  # fmt: skip


def test_a_worker_uses_them(make_folder: Make) -> None:
    """The file beside the model by itself, in pages of another name; another model's file stops the start."""
    folder = make_folder()
    loaded = load_model(folder, resolve("cpu"))
    scales, _ = _scales(loaded)
    plain = preparation(_settings(folder))()
    write(default_file(folder), scales, loaded.digest, {})
    prepared = preparation(_settings(folder))()
    again = preparation(_settings(folder, kv_scales="1"))()

    assert ["1", "calibrated", "1"] == [one.facts["kv_scales"] for one in (plain, prepared, again)]
    assert torch.equal(prepared.engine.executor.kv.k_scale, scales.k)
    assert torch.equal(prepared.engine.executor.kv.v_scale, scales.v)
    formats = [one.engine.namespaces.kv_format for one in (plain, prepared, again)]
    assert formats[0] == formats[2] != formats[1]
    write(default_file(folder), scales, "ab" * 32, {})
    with pytest.raises(ModelError, match="its scales are for another model"):
        preparation(_settings(folder))()


def test_a_model_that_overflows_is_refused(make_folder: Make) -> None:
    """Scales of what is not finite would be none."""
    folder = make_folder(max_shard_size="1GB")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if "layers.0.input_layernorm" in name or "layers.0.self_attn.k_proj" in name:
            tensors[name] = torch.full_like(tensors[name].float(), 3e38)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(QuantizeError, match="not finite"):
        _scales(load_model(folder, resolve("cpu")))
