"""`sluicegate calibrate` and `sluicegate eval`."""

from argparse import Namespace
from pathlib import Path

from sluicegate.errors import CommandError
from sluicegate.model_store import resolve
from sluicegate.quantize import progress_bar


def calibrate(arguments: Namespace) -> None:
    """Store scales of an FP8 KV cache beside the model."""
    from kernels.backend import resolve as backend
    from kernels.errors import KernelError
    from worker.kv_scales import KvScales, default_file, write
    from worker.model.errors import ModelError
    from worker.model.load import load_model
    from worker.quantize.errors import QuantizeError
    from worker.quantize.kv_calibration import calibrated_kv_scales
    from worker.quantize.windows import calibration_windows

    _, path = resolve(arguments.model)
    out = Path(arguments.out).expanduser() if arguments.out else default_file(path)
    if not out.parent.is_dir():
        raise CommandError(f"{out.parent}: no such folder")
    try:
        loaded = load_model(path, backend("cpu"))
        windows = calibration_windows(loaded.tokenizer, arguments.calibration_tokens).tolist()
        with progress_bar("calibrating", 2 * len(windows), is_bytes=False) as progress:
            k, v = calibrated_kv_scales(loaded, windows, progress)
    except (KernelError, ModelError, QuantizeError) as error:
        raise CommandError(str(error)) from None
    write(out, KvScales(k, v, "calibrated"), loaded.digest, {"calibration_tokens": str(arguments.calibration_tokens)})
    print(f"{out}: scales of {k.shape[0]} layers and {k.shape[1]} KV heads; keys {_range(k)}, values {_range(v)}")


def evaluate(arguments: Namespace) -> None:
    """Perplexity, distance from a reference, facts found again."""
    from bench.evaluation import EvaluationError, EvaluationOptions, evaluation
    from kernels.errors import KernelError
    from worker.model.errors import ModelError

    _, model = resolve(arguments.model)
    options = EvaluationOptions(
        model=model,
        reference=resolve(arguments.reference)[1] if arguments.reference else None,
        num_tokens=arguments.tokens,
        kv_dtype=arguments.kv_dtype,
        kv_scales=arguments.kv_scales,
        reference_kv_dtype=arguments.reference_kv_dtype,
        needle_tokens=arguments.needle_tokens,
        kernels=arguments.kernels,
    )
    try:
        with progress_bar("evaluating", options.num_runs, is_bytes=False) as progress:
            result = evaluation(options, progress)
        print(result.as_markdown(), flush=True)  # before a file that can't be written is one
        if arguments.json:
            Path(arguments.json).write_text(result.as_json(), encoding="utf-8")
        if arguments.picture:
            from bench.evaluation_picture import draw

            draw(result, Path(arguments.picture))
    except (EvaluationError, KernelError, ModelError) as error:
        raise CommandError(str(error)) from None
    except ImportError as error:
        raise CommandError(f"a picture needs matplotlib: {error}") from None


def _range(scale: object) -> str:
    """The smallest and the largest number of a tensor."""
    low, high = getattr(scale, "min")(), getattr(scale, "max")()  # noqa: B009  # torch isn't imported here
    return f"{float(low):.3g} to {float(high):.3g}"
