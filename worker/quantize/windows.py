"""The calibration text as windows of a model's tokens."""

import torch
from tokenizers import Tokenizer

from protocol.model_card import TokenizerSpec
from worker.quantize.errors import QuantizeError
from worker.quantize.texts import calibration_text

WINDOW_TOKENS = 512


def calibration_windows(spec: TokenizerSpec, num_tokens: int) -> torch.Tensor:
    """int64 [num_windows, WINDOW_TOKENS], as many whole windows as fit; each begins as a prompt does. Raises QuantizeError."""
    first = [spec.bos_token_id] if spec.add_bos and spec.bos_token_id is not None else []
    step = WINDOW_TOKENS - len(first)
    ids = Tokenizer.from_str(spec.tokenizer_json).encode(calibration_text(), add_special_tokens=False).ids
    num_windows, most = num_tokens // WINDOW_TOKENS, len(ids) // step
    if not 1 <= num_windows <= most:
        raise QuantizeError(f"calibration takes {WINDOW_TOKENS} to {most * WINDOW_TOKENS} tokens, got {num_tokens}")
    return torch.tensor([[*first, *ids[row * step : (row + 1) * step]] for row in range(num_windows)])
