"""`sluicegate model list|pull|inspect`."""

from argparse import Namespace

from sluicegate.environment import data_folder
from sluicegate.errors import CommandError
from sluicegate.model_store import KNOWN_MODELS, model_path, pull, resolve


def list_models(arguments: Namespace) -> None:
    """Models that can be fetched by name."""
    print(f"{'NAME':<26} {'SIZE':>8}  {'LICENSE':<12} {'HERE':<5} DESCRIPTION")
    for known in KNOWN_MODELS.values():
        here = "yes" if model_path(known).is_file() else "no"
        print(f"{known.name:<26} {known.num_bytes / 1e6:>5.0f} MB  {known.license:<12} {here:<5} {known.title}")


def pull_model(arguments: Namespace) -> None:
    """Fetch a model now rather than at the first use."""
    print(pull(arguments.model))


def inspect_model(arguments: Namespace) -> None:
    """What a model is, without loading its weights."""
    from worker.model.decoder import pool_layout
    from worker.model.errors import ModelError
    from worker.model.load import open_checkpoint

    name, path = resolve(arguments.model, data_folder(arguments.data))
    try:
        checkpoint = open_checkpoint(path)
    except ModelError as error:
        raise CommandError(str(error)) from None
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    layout, experts = pool_layout(config, 1, 1, "fp8"), config.experts
    heads = f"{config.num_heads} query, {config.num_kv_heads} KV, of {config.head_dim}"
    chosen = f"{experts.num_experts} of size {experts.size}, {experts.top_k} for each token" if experts else "none"
    rows = {
        "name": name,
        "path": path,
        "sha256": checkpoint.digest.result(),
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": heads
        if config.latent is None
        else f"{config.num_heads}, over a latent vector of {config.latent.kv_rank}",
        "FFN size": config.ffn_size,
        "experts": chosen,
        "vocabulary": config.vocab_size,
        "context": f"{config.context_length} tokens",
        "tensors": len(list(checkpoint.source.names())),
        "chat template": "yes" if tokenizer.chat_template else "no",
        "end-of-text ids": ", ".join(map(str, tokenizer.eos_token_ids)) or "none",
        "KV per token": f"{2 * layout.token_bytes} bytes in bf16, {layout.token_bytes} in fp8",
    }
    for label, value in rows.items():
        print(f"{label:<16} {value}")
