"""Matrices quantized with GPTQ, layer by layer: each sees the inputs that the quantized layers before it give, weighed by how much each token counts.

In memory are one layer in float32, the second moments of its inputs, and the activations of the calibration windows; the model is not.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from worker.quantize.float_layers import ROLES, Observer
from worker.quantize.gptq import gptq
from worker.quantize.layer_reader import LayerReader
from worker.quantize.plan import Plan, layer_of
from worker.quantize.policy import module_of
from worker.quantize.rounding import Precision, Quantized, rounded_to_nearest
from worker.quantize.run import Progress, chunks
from worker.quantize.token_weights import TokenWeights, token_weights

Finished = Callable[[str, Precision], Quantized | None]  # a module of the result, if an earlier run has finished it


class Calibrated:
    """A `Method`. Asked for a matrix of some layer, it first brings its windows there; matrices outside layers are rounded to nearest."""

    def __init__(
        self,
        reader: LayerReader,
        plan: Plan,
        windows: torch.Tensor,
        folder: Path,
        finished: Finished,
        progress: Progress,
    ) -> None:
        """windows int64 [num_windows, num_tokens]; `folder` has room for a file meanwhile. `progress` is told of `weighing_bytes` in parts."""
        self._reader = reader
        self._plan = plan
        self._finished = finished
        self._windows = windows
        self._folder = folder
        self._progress = progress
        self._token_weights: TokenWeights | None = None
        self._hidden: torch.Tensor | None = None  # float32 [num_windows, num_tokens, hidden]
        self._next_layer = 0
        self._ready: dict[str, Quantized] = {}

    def rows(self, name: str, precision: Precision) -> Iterator[Quantized]:
        """See `Method.rows`."""
        layer = layer_of(name)
        while layer is not None and layer < self._reader.layers.config.num_layers and layer >= self._next_layer:
            self._ready = self._pass(self._next_layer)
            self._next_layer += 1
        if name in self._ready:
            yield self._ready.pop(name)
        else:
            for _, values in chunks(self._reader.source, name):
                yield rounded_to_nearest(values.float(), precision, self._plan.scale_dtype)

    def _pass(self, layer: int) -> dict[str, Quantized]:
        """Bring the windows through a layer; its quantized matrices."""
        if self._hidden is None:
            self._hidden = self._reader.embedded(self._windows)
        names, weights = self._reader.names(layer), self._reader.weights(layer)
        found = self._from_earlier(names)
        if found is None:
            found = self._quantized(names, weights, self._moments(layer, weights))
        for role, name in names.items():
            if name in found:
                weights[role] = found[name].dequantize()
        for number, window in enumerate(self._hidden):
            self._hidden[number] = self._reader.layers(window, layer, weights)
        return found

    def _precision(self, name: str) -> Precision | None:
        module = module_of(name)
        return self._plan.precisions.get(module) if module else None

    def _from_earlier(self, names: Mapping[str, str]) -> dict[str, Quantized] | None:
        """All of a layer's quantized matrices as an earlier run wrote them."""
        wanted = {name: precision for name in names.values() if (precision := self._precision(name))}
        found = {name: self._finished(name, precision) for name, precision in wanted.items()}
        return None if None in found.values() else {name: rows for name, rows in found.items() if rows is not None}

    def _moments(self, layer: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """For each matrix the sum of w x x^T over its inputs x and their tokens' weights w, float32 [in, in]."""
        if self._token_weights is None:
            half = weighing_bytes(self._reader) // (2 * self._reader.layers.config.num_layers)
            self._token_weights = token_weights(self._reader, self._windows, self._folder, lambda: self._progress(half))
        sums = {role: torch.zeros(weights[role].shape[1], weights[role].shape[1]) for role in ROLES}
        assert self._hidden is not None
        for number, window in enumerate(self._hidden):
            by_role = {role: values[number] for role, values in self._token_weights[layer].items()}
            self._reader.layers(window, layer, weights, _Moments(sums, by_role))
        return sums

    def _quantized(
        self, names: Mapping[str, str], weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
    ) -> dict[str, Quantized]:
        found = {}
        for role, sums in moments.items():
            precision = self._precision(names[role])
            if precision is not None:
                found[names[role]] = gptq(weights[role], sums, precision, self._plan.scale_dtype)
        return found


def weighing_bytes(reader: LayerReader) -> int:
    """The size of all layers, which are read to find the tokens' weights before anything is quantized."""
    tensors = reader.source.tensors
    layers = range(reader.layers.config.num_layers)
    return sum(tensors[name].layout.nbytes for layer in layers for name in reader.names(layer).values())


class _Moments(Observer):
    """Adds up weighed second moments by role."""

    def __init__(self, sums: Mapping[str, torch.Tensor], token_weights: Mapping[str, torch.Tensor]) -> None:
        self._sums = sums
        self._token_weights = token_weights  # float32 [num_tokens] each

    def given(self, roles: tuple[str, ...], x: torch.Tensor) -> None:
        for role in roles:
            weighed = x * self._token_weights[role].sqrt()[:, None]
            self._sums[role].addmm_(weighed.t(), weighed)
