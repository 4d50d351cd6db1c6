"""A source's layers as float32 matrices by their roles, one layer at a time, and texts as embeddings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from worker.quantize.float_layers import FloatLayers
from worker.quantize.run import chunks
from worker.quantize.source import Source


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Of a dense model whose tensors have been checked."""

    source: Source
    layers: FloatLayers

    def names(self, layer: int) -> Mapping[str, str]:
        """The layer's tensors by role."""
        named = {role: name.format(layer=layer) for role, name in self.layers.names.items() if "{layer}" in name}
        return {role: name for role, name in named.items() if name in self.source.tensors}

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """The layer's tensors by role, float32. Raises QuantizeError."""
        return {role: self.whole(name) for role, name in self.names(layer).items()}

    def whole(self, name: str) -> torch.Tensor:
        """A tensor, float32. Raises QuantizeError."""
        return torch.cat([values.float() for _, values in chunks(self.source, name)])

    def embedded(self, windows: torch.Tensor) -> torch.Tensor:
        """float32 [*windows.shape, hidden]. Rows of the table are read in parts, as all of it may be larger than any layer. Raises QuantizeError."""
        hidden = torch.empty(*windows.shape, self.layers.config.hidden_size)
        for first, values in chunks(self.source, self.layers.names["embedding"]):
            here = (windows >= first) & (windows < first + len(values))
            hidden[here] = values[windows[here] - first].float()
        return hidden.mul_(self.layers.config.embedding_factor)

    def head(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The head's rows in parts: the first one's number, and float32 [rows, hidden]. Raises QuantizeError."""
        name = self.layers.names["embedding" if self.layers.config.tie_embeddings else "head"]
        for first, values in chunks(self.source, name):
            yield first, values.float()
