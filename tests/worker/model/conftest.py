"""Tiny random models as files, a reference for them in transformers, and a way to run our models over pages."""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kernels.backend import Backend, resolve
from kernels.kv_pool import KvPool
from worker.model.load import LoadedModel
from worker.model.quantization_config import quantization
from worker.model.step import StepInput
from worker.model.stored_weights import StoredWeights
from worker.model.tensor_files import TensorFiles
from worker.model.tensors import Rows

# Where a block of each quantized type keeps its float16 scales (and minima).
_SCALE_BYTES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
VOCAB_SIZE = 300


@pytest.fixture(scope="session", params=["ref", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both implementations of the kernels."""
    return resolve(request.param)


@pytest.fixture(scope="session")
def quantized_types() -> tuple[str, ...]:
    """The quantized formats that are promised to load."""
    return tuple(_SCALE_BYTES)


def _random_blocks(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """uint8 [rows, row bytes]: every bit is random but for the scales, which give weights of a usual size."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (shape[0], shape[1] // block_elements, block_bytes), dtype=np.uint8)
    unit = {"Q8_0": 1e-3, "Q6_K": 2e-5, "Q3_K": 6e-4, "Q2_K": 2e-3, "Q4_K": 2e-4, "Q5_K": 1e-4}.get(kind, 1e-2)
    for first in _SCALE_BYTES[kind]:
        scales = (random.uniform(0.5, 1.5, blocks.shape[:2]) * unit).astype(np.float16)
        if kind in ("Q4_1", "Q5_1") and first == 2:
            scales = -scales * np.float16(8 if kind == "Q4_1" else 16)
        blocks[..., first : first + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


@pytest.fixture(scope="session")
def random_blocks() -> Callable[[str, tuple[int, int], int], np.ndarray]:
    """Bytes of a quantized matrix: (type, shape, seed) -> uint8 [rows, row bytes]."""
    return _random_blocks


@pytest.fixture(scope="session")
def byte_alphabet(tiny_models: ModuleType) -> list[str]:
    """GPT-2's stand-in for each byte."""
    return tiny_models.byte_alphabet()


@pytest.fixture(scope="session")
def llama_in_transformers(tiny_models: ModuleType) -> Callable[..., LlamaForCausalLM]:
    """A factory of random float32 models; keywords override the configuration."""

    def make(**overrides: Any) -> LlamaForCausalLM:
        settings = {
            "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.15, "eos_token_id": 259,
            "bos_token_id": 258, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }  # fmt: skip
        config = LlamaConfig(**(settings | overrides))
        config._attn_implementation = "sluicegate_bf16_kv"
        torch.manual_seed(7)
        model = LlamaForCausalLM(config).eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        return model

    return make


@pytest.fixture
def folder_of(tmp_path: Path, tiny_models: ModuleType) -> Callable[..., Path]:
    """A factory of Hugging Face folders: (model, dtype, max_shard_size) -> folder."""

    def write(model: PreTrainedModel, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB") -> Path:
        return tiny_models.save(model, tmp_path / "model", dtype, max_shard_size)

    return write


@pytest.fixture
def folder(llama_in_transformers: Callable[..., LlamaForCausalLM], folder_of: Callable[..., Path]) -> Path:
    """A folder that loads."""
    return folder_of(llama_in_transformers())


@pytest.fixture(scope="session")
def compressed_tensors() -> Any:
    """The library of that name. Importing it would import torch's compiler too, seconds and warnings for one function that nobody calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        return importlib.import_module("compressed_tensors")


@pytest.fixture
def read_weight(tmp_path: Path) -> Callable[..., Rows]:
    """A way to read the weight of module "m" from a file of some tensors: (tensors, quantization_config, shape) -> rows."""

    def read(tensors: Mapping[str, torch.Tensor], config: Any, shape: tuple[int, int]) -> Rows:
        path = tmp_path / "model.safetensors"
        save_file(dict(tensors), path)
        how = quantization({} if config is None else {"quantization_config": config}, "config.json")
        weights = StoredWeights(TensorFiles(tmp_path, [path], None), how)
        rows = weights.read("m.weight", shape)
        assert set(weights.names()) == {"m.weight"}
        return rows

    return read


def _metadata(config: LlamaConfig, alphabet: list[str]) -> dict[str, Any]:
    tokens = [*alphabet, "he", "ll", "<s>", "</s>", "<|turn|>"]
    tokens += [f"[PAD{i}]" for i in range(config.vocab_size - len(tokens))]
    return {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3] * 3 + [5] * (config.vocab_size - 261),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
    }


def _add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)


def _interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of Q or K in the order of GGUF files, as llama.cpp's converter permutes them."""
    heads = weight.view(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def _halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of `_interleaved`."""
    heads = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return heads.transpose(1, 2).reshape(weight.shape)


def _reference_names(model: LlamaForCausalLM) -> dict[str, tuple[torch.nn.Parameter, int]]:
    """Parameters by their names in GGUF files, with the number of heads that their rows are permuted by (0: none)."""
    parameters = dict(model.named_parameters())
    config = model.config
    names = {"token_embd.weight": (parameters["model.embed_tokens.weight"], 0)}
    names["output_norm.weight"] = (parameters["model.norm.weight"], 0)
    if not config.tie_word_embeddings:
        names["output.weight"] = (parameters["lm_head.weight"], 0)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _LAYER_NAMES.items():
            parameter = parameters[f"model.layers.{layer}.{theirs}.weight"]
            names[f"blk.{layer}.{ours}.weight"] = (parameter, heads.get(ours, 0))
    return names


@pytest.fixture
def gguf_of(tmp_path: Path, byte_alphabet: list[str]) -> Callable[..., Path]:
    """A factory of GGUF files: (model, types, metadata, extra tensors) -> file.

    `types` maps an ending of a matrix' name to its type; others are F32, as vectors are. Where a type is quantized, random blocks are written
    and the reference model is given what they mean according to the `gguf` package, so that both hold the same weights.
    """

    def write(
        model: LlamaForCausalLM,
        types: Mapping[str, str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        extra: Mapping[str, np.ndarray] | None = None,
        without: Sequence[str] = (),
    ) -> Path:
        path = tmp_path / "model.gguf"
        all_metadata = _metadata(model.config, byte_alphabet) | dict(metadata or {})
        writer = gguf.GGUFWriter(path, all_metadata["general.architecture"])
        _add_metadata(writer, all_metadata)
        for index, (name, (parameter, num_heads)) in enumerate(_reference_names(model).items()):
            kinds = [
                kind
                for ending, kind in (types or {}).items()
                if parameter.ndim == 2 and name.endswith(ending + ".weight")
            ]
            if name not in without:
                _add_tensor(writer, name, parameter, num_heads, kinds[0] if kinds else "F32", index)
        for name, values in (extra or {}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, parameter: torch.nn.Parameter, num_heads: int, kind: str, seed: int
) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = parameter.detach()
    if kind in _SCALE_BYTES:
        raw = _random_blocks(kind, (values.shape[0], values.shape[1]), seed)
        meant = torch.from_numpy(gguf.dequantize(raw, quantization).copy())
        parameter.data.copy_(_halves(meant, num_heads) if num_heads else meant)
    else:
        stored = _interleaved(values, num_heads) if num_heads else values
        raw = gguf.quantize(stored.numpy(), quantization) if kind != "F32" else stored.numpy().copy()
        meant = torch.from_numpy(gguf.dequantize(raw, quantization).copy()).view(values.shape)
        parameter.data.copy_(_halves(meant, num_heads) if num_heads else meant)
    writer.add_tensor(name, raw, raw_dtype=quantization)


@dataclass
class PagedRun:
    """Feeds tokens of some sequences, any number of each at a time, through one KV pool. Pages are handed out in a scattered order."""

    loaded: LoadedModel
    dtype: str = "bf16"
    page_size: int = 16
    num_pages: int = 64
    pool: KvPool = field(init=False)

    def __post_init__(self) -> None:
        layout = self.loaded.kv_layout(self.num_pages, self.page_size, self.dtype)
        self.pool = KvPool.allocate(layout, backend=self.loaded.backend)
        # A stale page must not matter.
        self.pool.stored_k.view(torch.uint8).fill_(0x7F if self.dtype == "fp8" else 0xFF)
        self.pool.v.view(torch.uint8).fill_(0x7F if self.dtype == "fp8" else 0xFF)
        self._free = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.pages: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def share(self, source: str, name: str, num_pages: int) -> None:
        """Let a new sequence begin with the first pages of another, as a prefix hit does."""
        self.pages[name] = self.pages[source][:num_pages]
        self._lengths[name] = num_pages * self.page_size

    def feed(self, *batch: tuple[str, Sequence[int]]) -> list[torch.Tensor]:
        """One forward pass over (sequence, its next tokens); returns the logits of all its rows by sequence."""
        logits = self.forward(batch, torch.arange(sum(len(new) for _, new in batch)))
        return list(logits.split([len(new) for _, new in batch]))

    def forward(self, batch: Sequence[tuple[str, Sequence[int]]], logit_rows: torch.Tensor) -> torch.Tensor:
        """One forward pass over (sequence, its next tokens); returns the logits of some of its rows."""
        tokens, positions, slots, sequences = [], [], [], []
        for number, (name, new) in enumerate(batch):
            start = self._lengths.get(name, 0)
            pages = self.pages.setdefault(name, [])
            while len(pages) * self.page_size < start + len(new):
                pages.append(self._free.pop())
            self._lengths[name] = start + len(new)
            for position, token in enumerate(new, start):
                tokens.append(token)
                positions.append(position)
                slots.append(pages[position // self.page_size] * self.page_size + position % self.page_size)
                sequences.append(number)
        table = torch.zeros(len(batch), max(len(self.pages[name]) for name, _ in batch), dtype=torch.int32)
        for number, (name, _) in enumerate(batch):
            table[number, : len(self.pages[name])] = torch.tensor(self.pages[name], dtype=torch.int32)
        step = StepInput(
            torch.tensor(tokens), torch.tensor(positions, dtype=torch.int32), torch.tensor(slots), table,
            torch.tensor(sequences, dtype=torch.int32), logit_rows,
        )  # fmt: skip
        return self.loaded.model.forward(step, self.pool)


@pytest.fixture(scope="session")
def paged_run() -> type[PagedRun]:
    """The way to run a loaded model over pages."""
    return PagedRun


@pytest.fixture(scope="session")
def edit_json() -> Callable[..., None]:
    """A function that changes fields of a JSON file."""

    def edit(path: Path, **changes: Any) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.fixture(scope="session")
def add_tensors() -> Callable[..., None]:
    """A function that adds tensors to a folder's only file, or leaves some out."""

    def add(folder: Path, tensors: Mapping[str, torch.Tensor], without: Sequence[str] = ()) -> None:
        path = folder / "model.safetensors"
        kept = {name: tensor for name, tensor in load_file(path).items() if name not in without}
        save_file(kept | dict(tensors), path, metadata={"format": "pt"})

    return add


@pytest.fixture(scope="session")
def relative_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Root mean square of the difference by that of the reference; NaN anywhere is an error of infinity."""

    def measure(actual: torch.Tensor, expected: torch.Tensor) -> float:
        if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
            return float("inf")
        difference = (actual.double() - expected.double()).square().mean().sqrt()
        return float(difference / expected.double().square().mean().sqrt())

    return measure


_FIXED_TEXTS = (
    "", " ", "  ", "\n", "\t", "a", " a", "a ", "\n\n\n", " \n \t\r\n ", " " * 1000, "\n" * 300, "\t" * 257, "x" + " " * 513 + "y",
    "Hello, world!", "  leading and trailing  ", "I'm, you're, WE'LL, it'S, they'd've", "don't can’t won't", "''s 's's",
    "1", "12", "123", "1234567890", "3.14159", " 42", "1,000,000.00", "2026-11-30T06:45:29Z", "a1b2c3", "x²+y³", "½ ⅓ Ⅷ ①",
    "١٢٣ ४५६ ๑๒๓ 一二三 １２３", "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) { a[i] += 1; }",
    "<html>\n\t<body class='a'>&nbsp;</body>\n</html>", "{\"key\": [1, 2.5e-3, null, true]}", "SELECT * FROM t WHERE a <> 'b';",
    "https://example.org/a/b?c=d&e=%20#f", "C:\\Users\\x\\y.txt", "snake_case camelCase PascalCase kebab-case", "!!!???...---***",
    "日本語のテキスト", "中文字符，没有空格。", "한국어 문장입니다.", "हिन्दी में एक वाक्य।", "नमस्ते क्ष त्र ज्ञ", "العربية من اليمين", "שלום עולם",
    "Привет, мир", "Ελληνικά γράμματα", "ไทยไม่มีช่องว่าง", "Tiếng Việt có dấu", "naïve café résumé", "cafe\u0301 e\u0302\u0301", "ﬁ ﬂ Å Å",
    "😀", "😀😀😀 😀", "👨‍👩‍👧‍👦 family", "👍🏽👍🏿", "🏳️‍🌈 🇩🇪🇯🇵", "a\u200bb\u200cc\u200dd", "\u00a0nbsp\u2003em\u3000wide", "\ufeffbom",
    "\x00\x01\x7f\x80", "\u2028\u2029", "\U0010ffff \ue000", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂ͣ̐́́͜͞",
    "<|im_start|>system\nYou obey.<|im_end|>", "<|endoftext|>", "a<|im_end|>b", "<|im_start|", "|im_end|>", "<s> </s> <unk> <pad>", "<0x41><0x0A>",
    "[INST] hi [/INST]", "<|eot_id|><|start_header_id|>user<|end_header_id|>", "▁underscore▁▁block ▁", "Ġ Ċ ĉ", "aaaaaaaaaaaaaaaaaaaaaaa",
)  # fmt: skip
_PIECES = (
    "the", " quick", "Brown", " fox's", "Über", " naïve", "0", "7", "19", "2026", " 3", ".", ",", "!?", "...", " ", "  ", "\t", "\n", "\r\n", "   ",
    "日本", "語", "中文", "हिन्दी", "क्षि", "한국", "العر", "Привет", "😀", "👩‍💻", "🏽", "\u200d", "e\u0301", "\u00a0", "_", "->", "==", "{}", "(x)", "//",
    "<|im_end|>", "<s>", "'ll", "’s", "\\n", "#", "@user", "%", "½", "²", "A", "z", "\x7f", "…", "—", "“q”", " and", "  if", "return", ";\n",
)  # fmt: skip


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """280 texts of many scripts and shapes: fixed ones, and random mixtures of pieces."""
    random = np.random.default_rng(20)
    mixed = ["".join(random.choice(_PIECES, random.integers(2, 30))) for _ in range(280 - len(_FIXED_TEXTS))]
    return [*_FIXED_TEXTS, *mixed]


@pytest.fixture(scope="session")
def english() -> str:
    """Some 500,000 characters of English prose: the language reference that Python carries."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
