"""The mosaic model: LLaVA's composition of a SigLIP vision tower and an OLMoE text model, all transformers' own."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, OlmoeConfig, SiglipVisionConfig
from transformers.utils import logging

from groupwise.core.errors import UserError
from groupwise.workloads.controller.tasks.mosaic.questions import IMAGE_TOKEN, PAD_TOKEN, VOCABULARY_SIZE
from groupwise.workloads.controller.tasks.mosaic.scene import CHANNELS, CROP_PIXELS, PATCH_PIXELS, Tier, image_tokens

ASSET = Path(__file__).parent / "asset"
IMPORTANCE_FILE = "importance.json"
BLOCKS = 16
TOP_K = 8
FEWEST_BLOCKS = 12
SMALLEST_TOP_K = 4
# Blocks before the last insertion position always run.
FIRST_DROPPABLE_BLOCK = 5


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


def load_mosaic(folder: Path = ASSET, dtype: torch.dtype = torch.float32) -> LlavaForConditionalGeneration:
    """Load the trained model; the shipped one unless another folder is named."""
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"No mosaic model in {folder}: run `python -m tools.mosaic pretrain`, or reinstall groupwise.")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it loads at once
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
    if shown:
        logging.enable_progress_bar()
    return model


def load_drop_order(folder: Path = ASSET) -> list[int]:
    """Blocks in the order in which they are dropped, as `python -m tools.mosaic importance` has measured it."""
    return [int(block) for block in json.loads((folder / IMPORTANCE_FILE).read_text())["drop_order"]]


def prompt(question: Sequence[int], tier: Tier) -> Int[Tensor, "1 tokens"]:
    """Return the input ids of one question: a placeholder per image token, then the question."""
    return torch.tensor([[IMAGE_TOKEN] * image_tokens(tier) + list(question)])


@contextmanager
def configured(
    model: LlavaForConditionalGeneration, kept_blocks: Sequence[int], top_k: int, insertion_position: int = 1
) -> Iterator[LlavaForConditionalGeneration]:
    """Run only `kept_blocks`, with `top_k` experts in those from `insertion_position` on, while the context is open.

    This is the plain way, one configuration at a time: what is not kept is not called.
    """
    text = model.model.language_model
    all_blocks = text.layers
    text.layers = nn.ModuleList([all_blocks[block] for block in kept_blocks])
    try:
        for block in all_blocks[insertion_position:]:
            block.mlp.gate.top_k = top_k
        yield model
    finally:
        text.layers = all_blocks
        for block in all_blocks:
            block.mlp.gate.top_k = model.config.text_config.num_experts_per_tok


def kept_blocks(drop_order: Sequence[int], blocks: int, total: int = BLOCKS) -> list[int]:
    """Return which blocks run when `blocks` of them are wanted: the first of `drop_order` go first."""
    dropped = set(drop_order[: total - blocks])
    return [block for block in range(total) if block not in dropped]


def answer_logits(
    model: LlavaForConditionalGeneration,
    crops: Float[Tensor, "crops 3 side side"],
    question: Sequence[int],
    tier: Tier,
) -> Float[Tensor, " words"]:
    """Return the scores of the answer's token for one question about one mosaic: the batch-1 pass that is timed."""
    result = model(input_ids=prompt(question, tier), pixel_values=crops, logits_to_keep=1, use_cache=False)
    return result.logits[0, -1]
