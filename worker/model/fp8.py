"""Weights in 8-bit floats (e4m3): DeepSeek's and GLM's with a scale for each block of 128 x 128 (`weight_scale_inv`), compressed-tensors'
with one for each block, group, row or matrix (`weight_scale`). A weight is its code times its scale in all of them.
"""

import torch

from kernels.gpu_weights import FP8_GROUP
from worker.model.compressed_tensors import one_number
from worker.model.errors import ModelError
from worker.model.quantization_config import Scheme
from worker.model.tensor_files import TensorFiles
from worker.model.tensors import Fp8Rows


def read_fp8(files: TensorFiles, module: str, scheme: Scheme, shape: tuple[int, int]) -> Fp8Rows:
    """`weight` e4m3 [N, K] with its scales. Raises ModelError."""
    source = f"{files.label}: tensor {module + '.weight'!r}"
    if not scheme.is_float:
        raise ModelError(f"{source} holds 8-bit floats, config.json says integers")
    codes = files.read_checked(f"{module}.weight", shape, (torch.float8_e4m3fn,))
    names = [name for name in (f"{module}.weight_scale_inv", f"{module}.weight_scale") if name in files]
    if len(names) > 1:
        raise ModelError(f"{files.label}: tensors {names[0]!r} and {names[1]!r} are scales of the same values")
    name = names[0] if names else f"{module}.weight_scale" + ("_inv" if scheme.strategy == "block" else "")
    return Fp8Rows(codes, _scale(files, name, scheme, shape).contiguous())


def _scale(files: TensorFiles, name: str, scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor:
    """float32 [N, ceil(K / 128)]."""
    num_rows, num_columns = shape
    num_groups = -(-num_columns // FP8_GROUP)
    if scheme.strategy == "tensor":
        return one_number(files, name).expand(num_rows, num_groups)
    if scheme.strategy == "channel":
        is_flat = files.entry(name).shape == (num_rows,)
        scale = files.read_checked(name, (num_rows,) if is_flat else (num_rows, 1))
        return scale.float().view(num_rows, 1).expand(num_rows, num_groups)
    height, width = scheme.block if scheme.strategy == "block" else (1, scheme.group_size)
    if width % FP8_GROUP:
        raise ModelError(
            f"{files.label}: tensor {name!r}: groups of {width} columns are not supported: a multiple of {FP8_GROUP} is"
        )
    scale = files.read_checked(name, (-(-num_rows // height), -(-num_columns // width))).float()
    wide = scale.repeat_interleave(width // FP8_GROUP, dim=1)[:, :num_groups]
    return wide.repeat_interleave(height, dim=0)[:num_rows]
