"""The embedded mosaic model: transformers' LLaVA of a SigLIP vision tower and an OLMoE text model, its knobs and its
front end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration, OlmoeConfig, SiglipVisionConfig
from transformers.utils import logging

from groupwise.core.errors import UserError
from groupwise.dist.devices import move_module
from groupwise.workloads.controller.model.adapters import Sample, adapter_for
from groupwise.workloads.controller.model.images import LazyCrops, read_image
from groupwise.workloads.controller.model.inputs import ImageInput, check_length
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.model.load import LoadedModel
from groupwise.workloads.controller.tasks.mosaic.questions import (
    IMAGE_TOKEN,
    PAD_TOKEN,
    VOCABULARY_SIZE,
    decode,
    encode,
    make_question_set,
)
from groupwise.workloads.controller.tasks.mosaic.scene import (
    CHANNELS,
    CROP_PIXELS,
    CROPS,
    PATCH_PIXELS,
    HandwritingSplit,
    Tier,
    check_size,
    crops_with_overview,
    cut,
    shrink_whole,
)

NAME = "mosaic"
ASSET = Path(__file__).parent / "asset"
IMPORTANCE_FILE = "importance.json"
BLOCKS = 12
TOP_K = 8
FEWEST_BLOCKS = 8
SMALLEST_TOP_K = 4
# Blocks before the last insertion position always run.
FIRST_DROPPABLE_BLOCK = 5
_PROBE_MOSAICS = 24


@dataclass(frozen=True)
class MosaicSize:
    """The sizes that are free; blocks, top-k and tokens are the task's."""

    width: int = 64
    heads: int = 4
    expert_width: int = 64
    experts: int = 16
    vision_width: int = 96
    vision_blocks: int = 3
    blocks: int = BLOCKS
    top_k: int = TOP_K

    def config(self) -> LlavaConfig:
        """Return the configuration of the whole model."""
        text = OlmoeConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=self.width,
            intermediate_size=self.expert_width,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            norm_topk_prob=False,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            pad_token_id=PAD_TOKEN,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
        vision = SiglipVisionConfig(
            hidden_size=self.vision_width,
            intermediate_size=3 * self.vision_width,
            num_hidden_layers=self.vision_blocks,
            num_attention_heads=4,
            num_channels=CHANNELS,
            image_size=CROP_PIXELS,
            patch_size=PATCH_PIXELS,
            vision_use_head=False,
        )
        return LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=IMAGE_TOKEN,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
        )


def load(*, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LoadedModel:
    """The shipped model with its knobs and its front end."""
    model = move_module(load_mosaic(dtype=dtype), device)
    return LoadedModel(
        name=NAME,
        model=model,
        adapter=adapter_for(model),
        options=mosaic_options(),
        drop_order_is_measured=True,
        make_front_end=MosaicFrontEnd,
    )


def load_mosaic(folder: Path = ASSET, dtype: torch.dtype = torch.float32) -> LlavaForConditionalGeneration:
    """The trained model; the shipped one unless another folder is named."""
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"No mosaic model in {folder}: run `python -m tools.mosaic pretrain`, or reinstall groupwise.")
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it loads in an instant
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    if shows_progress:
        logging.enable_progress_bar()
    return model


def load_drop_order(folder: Path = ASSET) -> list[int]:
    """Blocks in the order in which they are dropped, as `python -m tools.mosaic importance` has measured it."""
    return [int(block) for block in json.loads((folder / IMPORTANCE_FILE).read_text())["drop_order"]]


def load_other_drop_orders(folder: Path = ASSET) -> list[tuple[int, ...]]:
    """The best orders for other mixtures of mosaics: baselines may use them."""
    return [tuple(order) for order in json.loads((folder / IMPORTANCE_FILE).read_text())["other_drop_orders"]]


def mosaic_options(folder: Path = ASSET) -> KnobOptions:
    """The knobs of the mosaic model in this folder."""
    return KnobOptions(
        crops_by_tier={tier.value: count for tier, count in CROPS.items()},
        total_blocks=BLOCKS,
        full_top_k=TOP_K,
        drop_order=tuple(load_drop_order(folder)),
        max_dropped_blocks=BLOCKS - FEWEST_BLOCKS,
        smallest_top_k=SMALLEST_TOP_K,
    )


def mosaic_sample(pixels: Float[Tensor, "height width"], question_ids: Sequence[int]) -> Sample:
    """One question about one mosaic, named by its content. A tier is cut when it is read."""
    check_size(pixels[None])
    content = pixels.contiguous().numpy().tobytes() + bytes(question_ids)
    name = hashlib.blake2b(content, digest_size=16).hexdigest()
    shapes = {tier.value: (crops_with_overview(tier), CHANNELS, CROP_PIXELS, CROP_PIXELS) for tier in Tier}
    crops = LazyCrops(shapes, lambda tier: cut(pixels[None], Tier(tier))[0], pixels.numel())
    return Sample(name, crops, tuple(question_ids), overview=shrink_whole(pixels[None])[0])


class MosaicFrontEnd:
    """Mosaics are gray images, and questions are words of the task's vocabulary, such as "digit b3"."""

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded

    def sample(self, image: ImageInput, text: str) -> Sample:
        sample = mosaic_sample(_brightness(image), encode(text))
        check_length(len(sample.question_ids), sample.crops_by_tier, self._loaded)
        return sample

    def decode(self, tokens: Sequence[int]) -> str:
        return decode(list(tokens))

    def probe_samples(self, question_tokens: Sequence[int]) -> list[Sample]:
        """Questions of the task itself, of every kind: their lengths are the task's."""
        drawn, device = make_question_set(HandwritingSplit.VALIDATION, _PROBE_MOSAICS), self._loaded.model.device
        samples = []
        for mosaic in range(_PROBE_MOSAICS):
            row = mosaic * drawn.questions_per_mosaic + mosaic % drawn.questions_per_mosaic
            question_ids = drawn.questions.tokens[row, : drawn.questions.lengths[row]].tolist()
            sample = mosaic_sample(drawn.mosaics.pixels[mosaic], question_ids)
            crops = {tier: pixels.to(device) for tier, pixels in sample.crops_by_tier.items()}
            samples.append(replace(sample, crops_by_tier=crops))
        return samples


def _brightness(image: ImageInput) -> Float[Tensor, "height width"]:
    """From 0 for black to 1 for white, as mosaics are drawn."""
    if isinstance(image, Path | str):
        image = read_image(Path(image))
    if isinstance(image, Image.Image):
        image = np.array(image.convert("L"))
    pixels = torch.as_tensor(image).cpu()
    if pixels.ndim != 2:
        raise UserError(f"The mosaic is an array of shape {tuple(pixels.shape)}: give height x width, or a PIL image.")
    brightness = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    if not brightness.isfinite().all():
        raise UserError("The mosaic holds pixels that are not finite numbers. Brightness goes from 0 to 1.")
    return brightness
