"""An evaluation as a picture: how far each position's distribution is from the reference's, and facts found by depth. Needs matplotlib."""

from pathlib import Path

import torch

from bench.evaluation import Evaluation

_COLOURS = ("#0b6e4f", "#b0b7c3")


def draw(evaluation: Evaluation, path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(15, 4))
    titles = [entry.title for entry in evaluation.entries]
    panels[0].barh(titles, [entry.perplexity for entry in evaluation.entries], color=_COLOURS[: len(titles)])
    panels[0].set_title("perplexity", loc="left", fontsize=10)
    panels[0].invert_yaxis()
    if evaluation.reference is not None:
        divergences = torch.cat(evaluation.entries[0].divergences).clamp(min=1e-9).log10()
        panels[1].hist(divergences.numpy(), bins=60, color=_COLOURS[0])
        panels[1].set_title("KL from the reference by position, log10 nats", loc="left", fontsize=10)
    else:
        panels[1].axis("off")
    for title, found, colour in zip(titles, evaluation.needles, _COLOURS, strict=False):
        panels[2].plot(
            [one.depth for one in found], [one.probability for one in found], "o-", color=colour, label=title
        )
    if evaluation.needles:
        panels[2].set_ylim(-0.02, 1.02)
        panels[2].set_title(
            f"probability of the fact, by its depth in {evaluation.needle_tokens} tokens", loc="left", fontsize=10
        )
        panels[2].legend(fontsize=7)
    else:
        panels[2].axis("off")
    figure.suptitle(evaluation.model, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
