"""Teach the vision tower to speak in words: an image token should be the sum of the words for what its patch shows.

The words are those of the tiles, rows and digits there, each times the share of the patch that shows it. Beside it,
heads that exist only in training must tell every tile from the tower's output for one crop.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.mosaic.crops import CROPS, TOKENS_PER_CROP, Tier, coverage, cut
from groupwise.workloads.controller.mosaic.scene import COLUMNS, EMPTY, ROWS, TILES
from groupwise.workloads.controller.mosaic.words import (
    FIRST_NUMBER_TOKEN,
    FIRST_ROW_TOKEN,
    FIRST_TILE_TOKEN,
    NONE_TOKEN,
)

_LABELS = EMPTY + 1
_WORDS = [
    *range(FIRST_TILE_TOKEN, FIRST_TILE_TOKEN + TILES),
    *range(FIRST_ROW_TOKEN, FIRST_ROW_TOKEN + ROWS),
    *range(FIRST_NUMBER_TOKEN, FIRST_NUMBER_TOKEN + EMPTY),
    NONE_TOKEN,
]


@dataclass(frozen=True)
class Seen:
    """What the vision tower makes of the crops, and what the projector makes of that for the text model."""

    tower: Float[Tensor, "mosaics crops tokens vision_width"]
    projected: Float[Tensor, "mosaics crops tokens width"]


def see(model: LlavaForConditionalGeneration, pixels: Float[Tensor, "mosaics height width"], tier: Tier) -> Seen:
    """Look at all crops of these mosaics."""
    crops = cut(pixels, tier)
    found = model.model.get_image_features(pixel_values=crops.flatten(0, 1))
    projected = torch.stack(list(found.pooler_output))
    return Seen(found.hidden_states[-1].unflatten(0, crops.shape[:2]), projected.unflatten(0, crops.shape[:2]))


class TileHeads(nn.Module):
    """Tell the label of each tile a crop covers from the tower's output for that crop."""

    def __init__(self, vision_width: int) -> None:
        super().__init__()
        features = TOKENS_PER_CROP * vision_width
        self.overview = nn.Linear(features, TILES * _LABELS)
        self.crop = nn.ModuleDict({tier: nn.Linear(features, TILES // CROPS[tier] * _LABELS) for tier in Tier})

    def forward(
        self, tower: Float[Tensor, "mosaics crops tokens vision_width"], tier: Tier
    ) -> tuple[Float[Tensor, "all_tiles labels"], Float[Tensor, "all_tiles labels"]]:
        """Return the logits of all tiles of all mosaics, from the overview and from the crops."""
        by_crop = tower.flatten(2)
        crops = self.crop[tier](by_crop[:, 1:])
        return self.overview(by_crop[:, 0]).view(-1, _LABELS), crops.reshape(-1, _LABELS)


def alignment_loss(
    words: Float[Tensor, "vocabulary width"], seen: Seen, labels: Int[np.ndarray, "mosaics tiles"], tier: Tier
) -> Float[Tensor, ""]:
    """Return the squared distance of image tokens to the sum of their words, in units of a word's squared length."""
    named = words[_WORDS].detach()
    tiles = coverage(tier)
    rows = tiles.view(-1, ROWS, COLUMNS).sum(2)
    places = torch.cat([tiles, rows], dim=1).expand(len(labels), -1, -1)
    shown = tiles @ functional.one_hot(torch.from_numpy(labels), _LABELS).float()
    wanted = torch.cat([places, shown], dim=2) @ named
    distance = (seen.projected.flatten(1, 2) - wanted).square().sum(2).mean()
    return distance / named.square().sum(1).mean()


def tile_loss(
    heads: TileHeads, seen: Seen, labels: Int[np.ndarray, "mosaics tiles"], tier: Tier
) -> tuple[Float[Tensor, ""], float]:
    """Return the cross entropy of the tile heads, and the share of tiles that the crops' head got right."""
    overview, crops = heads(seen.tower, tier)
    targets = torch.from_numpy(labels).flatten()
    loss = functional.cross_entropy(overview, targets) + functional.cross_entropy(crops, targets)
    return loss, (crops.argmax(1) == targets).float().mean().item()
