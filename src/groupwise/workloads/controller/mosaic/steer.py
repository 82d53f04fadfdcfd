"""The mosaic model under the executor: its knobs, and its questions as samples."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from groupwise.workloads.controller.adapter import Sample
from groupwise.workloads.controller.knobs import KnobOptions
from groupwise.workloads.controller.mosaic.crops import CROPS, Tier, cut
from groupwise.workloads.controller.mosaic.model import ASSET, BLOCKS, FEWEST_BLOCKS, SMALLEST_TOP_K, TOP_K
from groupwise.workloads.controller.mosaic.score.importance import load_drop_order


def mosaic_options(folder: Path = ASSET) -> KnobOptions:
    """Return what can be chosen for the mosaic model in this folder."""
    return KnobOptions(
        crops={tier.value: count for tier, count in CROPS.items()},
        total_blocks=BLOCKS,
        full_top_k=TOP_K,
        drop_order=tuple(load_drop_order(folder)),
        most_dropped=BLOCKS - FEWEST_BLOCKS,
        smallest_top_k=SMALLEST_TOP_K,
    )


def mosaic_sample(pixels: Float[Tensor, "height width"], question: Sequence[int]) -> Sample:
    """Return one question about one mosaic, named by what is in it."""
    content = pixels.contiguous().numpy().tobytes() + bytes(question)
    crops = {tier.value: cut(pixels[None], tier)[0] for tier in Tier}
    return Sample(hashlib.blake2b(content, digest_size=16).hexdigest(), crops, tuple(question))
