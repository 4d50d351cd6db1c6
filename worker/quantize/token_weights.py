"""How much an error at each token counts in each matrix: by what the model would make of it.

An error e in a matrix' output changes the distribution of next tokens by (g . e)^2 / 2 nats, to second order and on average, where g is the derivative by that output of the
logarithmic loss of tokens that are drawn from the model's own distribution (Fisher's information). The mean square of g is the token's weight. Some tokens' outputs are
hardly ever looked at again, above all those of the first token with its huge activations; unweighted, they are most of what GPTQ tries to keep right.
(GuidedQuant, Kim et al., 2025, arXiv:2505.07004, weighs by derivatives of the loss on the text itself.)

One layer is in memory at a time; what each layer is given lies in a file meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch

from worker.quantize.float_layers import ROLES, Observer
from worker.quantize.layer_reader import LayerReader

_SEED = 1
TokenWeights = list[dict[str, torch.Tensor]]  # by layer and role, float32 [num_windows, num_tokens]


def token_weights(
    reader: LayerReader, windows: torch.Tensor, folder: Path, progress: Callable[[], None]
) -> TokenWeights:
    """For windows int64 [num_windows, num_tokens]. `folder` holds 2 bytes for each token, layer and element of hidden while this runs.

    `progress` is told of each layer, twice. Raises QuantizeError.
    """
    layers = reader.layers
    num_layers = layers.config.num_layers
    with _file_backed(folder / "inputs.part", (num_layers, *windows.shape, layers.config.hidden_size)) as inputs:
        hidden = reader.embedded(windows)
        for layer in range(num_layers):
            inputs[layer] = hidden
            weights = reader.weights(layer)
            for number, window in enumerate(hidden):
                hidden[number] = layers(window, layer, weights)
            progress()
        derivative = _of_the_loss(reader, hidden)
        del hidden
        found: TokenWeights = []
        for layer in reversed(range(num_layers)):
            weights = reader.weights(layer)
            squares = {role: torch.empty(windows.shape) for role in ROLES}
            for number, window in enumerate(inputs[layer]):
                derivative[number], by_role = _one_layer_back(reader, layer, weights, window, derivative[number])
                for role, values in by_role.items():
                    squares[role][number] = values
            found.append(squares)
            progress()
    return found[::-1]


class _Outputs(Observer):
    """Keeps what each matrix gives."""

    def __init__(self) -> None:
        self.by_role: dict[str, torch.Tensor] = {}

    def made(self, role: str, y: torch.Tensor) -> None:
        self.by_role[role] = y


def _one_layer_back(
    reader: LayerReader, layer: int, weights: dict[str, torch.Tensor], window: torch.Tensor, derivative: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """From the derivative by a layer's output to that by its input, and the mean squares of those by each matrix' output, float32 [num_tokens]."""
    with torch.enable_grad():
        given, outputs = window.float().requires_grad_(), _Outputs()
        made = reader.layers(given, layer, weights, outputs)
        first, *others = torch.autograd.grad(made, [given, *outputs.by_role.values()], derivative)
    return first, {role: values.square().mean(dim=1) for role, values in zip(outputs.by_role, others, strict=True)}


def _of_the_loss(reader: LayerReader, hidden: torch.Tensor) -> torch.Tensor:
    """The derivative by the last layer's output float32 [num_windows, num_tokens, hidden], of the loss of one drawn token at each place."""
    norm = reader.whole(reader.layers.names["final_norm"])
    x = torch.stack([reader.layers.final(window, norm) for window in hidden])
    drawn, total = draw(reader, x)
    derivative = torch.zeros_like(x)
    for first, rows in reader.head():
        for number, window in enumerate(x):
            share = (window @ rows.t()).sub_(total[number, :, None]).exp_()
            here = ((drawn[number] >= first) & (drawn[number] < first + len(rows))).nonzero()[:, 0]
            share[here, drawn[number, here] - first] -= 1
            derivative[number].addmm_(share, rows)
    for number, window in enumerate(hidden):
        with torch.enable_grad():
            given = window.detach().requires_grad_()
            made = reader.layers.final(given, norm)
        (derivative[number],) = torch.autograd.grad(made, given, derivative[number])
    return derivative


def draw(reader: LayerReader, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token at each place, int64 [num_windows, num_tokens], from the distribution that the head makes of x float32 [num_windows, num_tokens, hidden], always the same
    ones; and the logarithm of the sum of the exponentials of its logits.

    The vocabulary comes in parts: all logits of a window may take more memory than the rest.
    """
    random = torch.Generator().manual_seed(_SEED)
    total, best = torch.full(x.shape[:2], float("-inf")), torch.full(x.shape[:2], float("-inf"))
    drawn = torch.zeros(x.shape[:2], dtype=torch.int64)
    for first, rows in reader.head():
        for number, window in enumerate(x):
            logits = window @ rows.t()
            total[number] = torch.logaddexp(total[number], logits.logsumexp(dim=1))
            # The largest of logits less the logarithm of exponential noise is a draw from their softmax.
            value, row = logits.sub_(torch.empty_like(logits).exponential_(generator=random).log_()).max(dim=1)
            drawn[number] = torch.where(value > best[number], first + row, drawn[number])
            best[number] = torch.maximum(value, best[number])
    return drawn, total


@contextmanager
def _file_backed(path: Path, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """A bfloat16 tensor in a file that is removed afterwards."""
    try:
        yield torch.from_file(str(path), shared=True, size=prod(shape), dtype=torch.bfloat16).view(shape)
    finally:
        path.unlink(missing_ok=True)
