"""Matrices quantized with GPTQ, layer by layer: each sees the inputs that the quantized layers before it give.

In memory are one layer in float32, the second moments of its inputs, and the activations of the calibration windows; the model is not.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from worker.quantize.float_layers import INPUTS, FloatLayers
from worker.quantize.gptq import gptq
from worker.quantize.plan import Plan, layer_of
from worker.quantize.policy import module_of
from worker.quantize.rounding import Precision, Quantized, rounded_to_nearest
from worker.quantize.run import chunks
from worker.quantize.source import Source

Finished = Callable[[str, Precision], Quantized | None]  # a module of the result, if an earlier run has finished it


class Calibrated:
    """A `Method`. Asked for a matrix of some layer, it first brings its windows there; matrices outside layers are rounded to nearest."""

    def __init__(
        self, source: Source, plan: Plan, layers: FloatLayers, windows: torch.Tensor, finished: Finished
    ) -> None:
        """windows int64 [num_windows, num_tokens]."""
        self._source = source
        self._plan = plan
        self._layers = layers
        self._finished = finished
        self._windows = windows
        self._hidden: torch.Tensor | None = None  # float32 [num_windows, num_tokens, hidden]
        self._next_layer = 0
        self._ready: dict[str, Quantized] = {}

    def rows(self, name: str, precision: Precision) -> Iterator[Quantized]:
        """See `Method.rows`."""
        layer = layer_of(name)
        while layer is not None and layer < self._layers.config.num_layers and layer >= self._next_layer:
            self._ready = self._pass(self._next_layer)
            self._next_layer += 1
        if name in self._ready:
            yield self._ready.pop(name)
        else:
            for _, values in chunks(self._source, name):
                yield rounded_to_nearest(values.float(), precision, self._plan.scale_dtype)

    def _pass(self, layer: int) -> dict[str, Quantized]:
        """Bring the windows through a layer; its quantized matrices."""
        if self._hidden is None:
            self._hidden = self._embedded()
        names = {
            role: name.format(layer=layer)
            for role, name in self._layers.names.items()
            if "{layer}" in name and name.format(layer=layer) in self._source.tensors
        }
        weights = {role: self._whole(name) for role, name in names.items()}
        found = self._from_earlier(names)
        if found is None:
            found = self._quantized(names, weights, self._moments(layer, weights))
        for role, name in names.items():
            if name in found:
                weights[role] = found[name].dequantize()
        for window in self._hidden:
            self._layers(window, layer, weights, None)
        return found

    def _precision(self, name: str) -> Precision | None:
        module = module_of(name)
        return self._plan.precisions.get(module) if module else None

    def _from_earlier(self, names: Mapping[str, str]) -> dict[str, Quantized] | None:
        """All of a layer's quantized matrices as an earlier run wrote them."""
        wanted = {name: precision for name in names.values() if (precision := self._precision(name))}
        found = {name: self._finished(name, precision) for name, precision in wanted.items()}
        return None if None in found.values() else {name: rows for name, rows in found.items() if rows is not None}

    def _moments(self, layer: int, weights: Mapping[str, torch.Tensor]) -> dict[tuple[str, ...], torch.Tensor]:
        """The sum of x x^T over the inputs x of each group of matrices, float32 [in, in]."""
        moments = {roles: torch.zeros(weights[roles[0]].shape[1], weights[roles[0]].shape[1]) for roles in INPUTS}
        assert self._hidden is not None
        for window in self._hidden:
            self._layers(window.clone(), layer, weights, lambda roles, x: moments[roles].addmm_(x.t(), x))
        return moments

    def _quantized(
        self,
        names: Mapping[str, str],
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[tuple[str, ...], torch.Tensor],
    ) -> dict[str, Quantized]:
        found = {}
        for roles, sums in moments.items():
            for role in roles:
                precision = self._precision(names[role])
                if precision is not None:
                    found[names[role]] = gptq(weights[role], sums, precision, self._plan.scale_dtype)
        return found

    def _whole(self, name: str) -> torch.Tensor:
        return torch.cat([values.float() for _, values in chunks(self._source, name)])

    def _embedded(self) -> torch.Tensor:
        """The windows' embeddings. Rows of the table are read in parts, as all of it may be larger than any layer."""
        name = self._layers.names["embedding"]
        hidden = torch.empty(*self._windows.shape, self._layers.config.hidden_size)
        for first, values in chunks(self._source, name):
            here = (self._windows >= first) & (self._windows < first + len(values))
            hidden[here] = values[self._windows[here] - first].float()
        return hidden.mul_(self._layers.config.embedding_factor)
