"""A picture of the families of mosaics: the same digits in each, whole, as the overview, and at every tier."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.tasks.mosaic.scene import (
    CROP_PIXELS,
    FAMILY_SHARES,
    PLAIN_JITTER,
    ROWS,
    HandwritingSplit,
    Tier,
    cut,
    draw_mosaics,
    load_handwriting,
)

_SEED = 4
_DARKEST, _BRIGHTEST = -0.7, 2.0  # of normalized crops


def draw_contact_sheet(path: Path) -> None:
    """Write the picture."""
    import matplotlib.pyplot as plt

    handwriting, columns = load_handwriting(HandwritingSplit.TEST), 2 + len(Tier)
    figure, axes = plt.subplots(len(FAMILY_SHARES), columns, figsize=(2.1 * columns, 1.7 * len(FAMILY_SHARES)))
    for row, ((style, framed), share) in zip(axes, FAMILY_SHARES.items(), strict=True):
        drawn = draw_mosaics(handwriting, 1, PLAIN_JITTER, np.random.default_rng(_SEED), {(style, framed): 1.0})
        row[0].imshow(drawn.pixels[0], cmap="gray", vmin=0, vmax=1)
        row[0].set_title(f"{style}, {'framed' if framed else 'no frame'} ({share:.0%})", fontsize=9)
        overview = cut(drawn.pixels, Tier.LOW)[0, 0, 0]
        for axis, title, pixels in zip(
            row[1:],
            ("overview", *(f"{tier} tier" for tier in Tier)),
            (overview, *(_side_by_side(cut(drawn.pixels, tier)[0, 1:, 0]) for tier in Tier)),
            strict=True,
        ):
            axis.imshow(pixels, cmap="gray", vmin=_DARKEST, vmax=_BRIGHTEST, aspect="auto")
            axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _side_by_side(crops: Float[Tensor, "crops side side"]) -> Float[Tensor, "height width"]:
    rows = crops.view(ROWS, -1, CROP_PIXELS, CROP_PIXELS)
    return torch.cat([torch.cat(list(row), dim=1) for row in rows])
