"""From a path and options to a prepared run: what a command shows before it starts, and how it starts."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from worker.model.architectures import folder_config
from worker.model.errors import ModelError
from worker.quantize.calibrated import Calibrated, weighing_bytes
from worker.quantize.errors import QuantizeError
from worker.quantize.float_layers import ARCHITECTURES, FloatLayers
from worker.quantize.gguf_source import GgufSource
from worker.quantize.layer_reader import LayerReader
from worker.quantize.packing import unpacked_parts
from worker.quantize.plan import Plan, make_plan
from worker.quantize.policy import make_policy, module_of
from worker.quantize.rounding import Precision, Quantized
from worker.quantize.run import Method, Progress, RoundToNearest, quantize
from worker.quantize.source import FolderSource, Source
from worker.quantize.texts import calibration_text
from worker.quantize.windows import WINDOW_TOKENS, calibration_windows

MethodName = Literal["rtn", "gptq"]
RECIPE = 6  # counts changes of the arithmetic: files of one result come from one recipe


@dataclass(frozen=True, slots=True)
class Options:
    """What a user chooses. `overrides` are patterns of module names with their bits."""

    method: MethodName = "rtn"
    policy: str = "auto"
    group_size: int = 32
    is_symmetric: bool = True
    overrides: tuple[tuple[str, int], ...] = ()
    shard_bytes: int = 2 << 30
    calibration_tokens: int = 32768


@dataclass(frozen=True, slots=True)
class Job:
    """A source, a plan and settings."""

    source: Source
    plan: Plan
    options: Options
    settings: dict[str, Any]
    reader: LayerReader | None  # for a calibrated method

    @property
    def work_bytes(self) -> int:
        """What a run from the beginning tells its `progress` in all."""
        once = sum(tensor.layout.nbytes for tensor in self.source.tensors.values())
        return once + (weighing_bytes(self.reader) if self.reader else 0)

    def run(self, folder: Path, progress: Progress) -> None:
        """See `quantize`."""
        method: Method = RoundToNearest(self.source, self.plan.scale_dtype)
        if self.reader is not None:
            windows = calibration_windows(self.source.tokenizer(), self.options.calibration_tokens)
            finished = _Finished(self.plan, self.source, folder)
            method = Calibrated(self.reader, self.plan, windows, folder, finished, progress)
        quantize(self.source, self.plan, method, folder, self.settings, progress)


def prepare(path: Path, options: Options) -> Job:
    """Read headers and settle what will be done; nothing is written. Raises QuantizeError."""
    source: Source = FolderSource(path) if path.is_dir() else GgufSource(path)
    four = Precision(4, options.group_size, options.is_symmetric)
    policy = make_policy(options.policy, four, options.overrides, source.config)
    is_layered = options.method == "gptq" or isinstance(source, GgufSource)
    plan = make_plan(source, policy, options.shard_bytes if is_layered else None)
    settings: dict[str, Any] = {
        "recipe": RECIPE, "method": options.method, "policy": policy.name, "group_size": options.group_size,
        "symmetric": options.is_symmetric, "overrides": [list(override) for override in options.overrides],
    }  # fmt: skip
    if is_layered:
        settings["shard_bytes"] = options.shard_bytes
    reader = None
    if options.method == "gptq":
        reader = _reader(source)
        settings["calibration_tokens"] = options.calibration_tokens
        settings["calibration_text"] = hashlib.sha256(calibration_text().encode()).hexdigest()
    return Job(source, plan, options, settings, reader)


def _reader(source: Source) -> LayerReader:
    """Raises QuantizeError for a model that can't be calibrated."""
    kind = source.config.get("model_type")
    if kind not in ARCHITECTURES:
        raise QuantizeError(
            f"{source.label}: method gptq knows {', '.join(ARCHITECTURES)}, not {str(kind)[:50]!r}; use rtn"
        )
    try:
        found, config = folder_config(dict(source.config), source.label)
    except ModelError as error:
        raise QuantizeError(str(error)) from None
    layers = FloatLayers.make(config, found.names, WINDOW_TOKENS)
    layers.check({name: tensor.layout.shape for name, tensor in source.tensors.items()}, source.label)
    return LayerReader(source, layers)


class _Finished:
    """Looks up modules in files that an earlier run has finished."""

    def __init__(self, plan: Plan, source: Source, folder: Path) -> None:
        self._plan = plan
        self._source = source
        self._folder = folder
        self._files = {name: shard.file for shard in plan.shards for name in shard.tensors}

    def __call__(self, name: str, precision: Precision) -> Quantized | None:
        path = self._folder / self._files[name]
        if not path.is_file():  # a file has its name when it's whole; `quantize` has checked those that were there
            return None
        module = module_of(name)
        names = self._plan.layouts(self._source, name)
        with safe_open(path, framework="pt") as file:
            parts = {key.removeprefix(f"{module}."): file.get_tensor(key) for key in names}
        return unpacked_parts(parts, precision)
