"""MolmoE's modules: transformers' OLMoE and CLIP, and the connector between them."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import CLIPVisionConfig, CLIPVisionModel, OlmoeConfig, OlmoeModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from groupwise.workloads.controller.model.molmoe.sizes import (
    CROP_SIDE,
    IMAGE_TOKENS,
    PATCH_SIDE,
    POOL_SIDE,
    MolmoeSizes,
)


class MolmoeConfig(PreTrainedConfig):
    """The published configuration in transformers' terms."""

    model_type = "molmoe"
    sub_configs = {"text_config": OlmoeConfig, "vision_config": CLIPVisionConfig}  # noqa: RUF012

    def __init__(
        self,
        text_config: Any = None,
        vision_config: Any = None,
        *,
        feature_blocks: tuple[int, ...] = (),
        head_rows: int = 0,
        image_token_ids: dict[str, int] | None = None,
        published_crop_rule: bool = False,
        **more: Any,
    ):
        self.text_config, self.vision_config = text_config, vision_config
        self.feature_blocks, self.head_rows = list(feature_blocks), head_rows
        self.image_token_ids = image_token_ids or {}
        self.published_crop_rule = published_crop_rule
        super().__init__(tie_word_embeddings=False, **more)

    @staticmethod
    def of_sizes(sizes: MolmoeSizes, *, published_crop_rule: bool = False) -> MolmoeConfig:
        """The embedding has all rows; a vision tower ends with the last block that the features need."""
        vision = sizes.vision
        text_config = OlmoeConfig(
            vocab_size=sizes.embedding_rows,
            hidden_size=sizes.width,
            intermediate_size=sizes.expert_width,
            num_hidden_layers=sizes.blocks,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            num_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
            norm_topk_prob=False,
            rms_norm_eps=sizes.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
            max_position_embeddings=sizes.max_tokens,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=sizes.vocabulary - 1,
            tie_word_embeddings=False,
        )
        vision_config = CLIPVisionConfig(
            hidden_size=vision.width,
            intermediate_size=vision.ffn_dim,
            num_hidden_layers=vision.blocks_run,
            num_attention_heads=vision.heads,
            image_size=CROP_SIDE,
            patch_size=PATCH_SIDE,
            hidden_act="quick_gelu",
            layer_norm_eps=vision.norm_eps,
        )
        return MolmoeConfig(
            text_config,
            vision_config,
            feature_blocks=vision.feature_blocks,
            head_rows=sizes.head_rows,
            image_token_ids=sizes.image_token_ids,
            published_crop_rule=published_crop_rule,
            architectures=["MolmoeForConditionalGeneration"],
        )

    @property
    def image_token_id(self) -> int:
        """Stands for the whole image in a prompt; it never reaches the model."""
        return self.image_token_ids[IMAGE_TOKENS[-1]]


class MolmoeVisionTower(CLIPVisionModel):
    """CLIP without its last norm; the outputs of some blocks, joined, are the features."""

    def __init__(self, config: CLIPVisionConfig, feature_blocks: tuple[int, ...]):
        super().__init__(config)
        self.post_layernorm = nn.Identity()
        self._feature_blocks = feature_blocks

    def forward(self, pixels: Float[Tensor, "crops 3 side side"]) -> Float[Tensor, "crops patches features"]:
        states = self.pre_layrnorm(self.embeddings(pixels))
        kept = {}
        for index, block in enumerate(self.encoder.layers):
            states = block(states, None)
            if index in self._feature_blocks:
                kept[index] = states[:, 1:]
        return torch.cat([kept[index] for index in self._feature_blocks], dim=-1)


class MolmoeConnector(nn.Module):
    """Pads are marked, four neighboring patches are pooled by attention, and a gated layer ends in the text's width."""

    def __init__(self, config: MolmoeConfig):
        super().__init__()
        vision, text = config.vision_config, config.text_config
        joined, pooled = vision.hidden_size * len(config.feature_blocks), vision.hidden_size
        self.heads = vision.num_attention_heads
        self.pad_embed = nn.Parameter(torch.zeros(2, joined))
        self.query, self.key, self.value = (nn.Linear(joined, pooled) for _ in range(3))
        self.output = nn.Linear(pooled, pooled)
        self.gate, self.up = (nn.Linear(pooled, text.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(text.intermediate_size, text.hidden_size, bias=False)

    def forward(
        self, features: Float[Tensor, "crops patches joined"], masks: Float[Tensor, "crops patches"]
    ) -> Float[Tensor, "crops pooled width"]:
        empty, partial = masks == 0, (masks < 1) & (masks != 0)
        marks = torch.stack([empty, partial], dim=-1).to(features.dtype)
        return self._project(self._pool(features + marks @ self.pad_embed))

    def _pool(self, features: Float[Tensor, "crops patches joined"]) -> Float[Tensor, "crops pooled half"]:
        """The mean of four patches asks the four."""
        crops, patches, joined = features.shape
        side = int(patches**0.5) // POOL_SIDE
        squares = features.view(crops, side, POOL_SIDE, side, POOL_SIDE, joined).transpose(2, 3)
        squares = squares.reshape(crops * side**2, POOL_SIDE**2, joined)
        asked = self.query(squares.mean(1, keepdim=True)), self.key(squares), self.value(squares)
        query, key, value = (states.unflatten(-1, (self.heads, -1)).transpose(1, 2) for states in asked)
        pooled = scaled_dot_product_attention(query, key, value)
        return self.output(pooled.flatten(1)).view(crops, side**2, -1)

    def _project(self, pooled: Float[Tensor, "crops pooled half"]) -> Float[Tensor, "crops pooled width"]:
        return self.down(silu(self.gate(pooled)) * self.up(pooled))


class _MolmoePreTrainedModel(PreTrainedModel):
    config_class = MolmoeConfig
    _supports_sdpa = True


class MolmoeModel(_MolmoePreTrainedModel):
    """The three parts."""

    def __init__(self, config: MolmoeConfig):
        super().__init__(config)
        self.vision_tower = MolmoeVisionTower(config.vision_config, tuple(config.feature_blocks))
        self.connector = MolmoeConnector(config)
        self.language_model = OlmoeModel._from_config(config.text_config)
        self.post_init()

    def crop_features(self, pixels: Float[Tensor, "crops 3 side side"]) -> Float[Tensor, "crops patches joined"]:
        """Of the vision tower. Pixels stay in float32 up to the check for empty crops."""
        features = self.vision_tower(pixels)
        return features.masked_fill(self._is_empty(pixels)[:, None, None], 0)

    def _is_empty(self, pixels: Float[Tensor, "crops 3 side side"]) -> Bool[Tensor, " crops"]:
        """Pixels of -1 mark a crop that only fills a batch.

        The training code asks that all of them are -1. The published code asks for any, which also hits images that
        happen to have such a pixel: it zeroes their features.
        """
        marked = (pixels == -1).flatten(1)
        return marked.any(1) if self.config.published_crop_rule else marked.all(1)


class MolmoeForConditionalGeneration(_MolmoePreTrainedModel):
    """`forward` takes embeddings in which the image is, or ids of text alone: an adapter makes the former."""

    def __init__(self, config: MolmoeConfig):
        super().__init__(config)
        self.model = MolmoeModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.head_rows, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.language_model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        return self.model.language_model

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **more: Any
    ) -> CausalLMOutputWithPast:
        outputs = self.model.language_model(input_ids=input_ids, inputs_embeds=inputs_embeds, **more)
        return CausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
