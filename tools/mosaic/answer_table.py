"""Answers to many questions under every configuration at once, by the dense pass.

All questions about a mosaic follow its image under a block mask, so they cost little more than one. Configurations that
begin with the same blocks share them: a walk over the tree of paths computes each branch once.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.tasks.mosaic.questions import PAD_TOKEN, QUESTION_TOKENS
from tools.mosaic.dense_forward import BlockPass, SharedPrefixLayout, block_pass, block_weights, pack, rms_norm

_MOSAICS_PER_PASS = 16
Path = tuple[int, ...]


@torch.inference_mode()
def answer_every_configuration(
    model: LlavaForConditionalGeneration,
    options: KnobOptions,
    questions: Sequence[Question],
    say: Callable[[int], None] = lambda done: None,
) -> UInt8[np.ndarray, "questions configurations"]:
    """The answers' tokens in the order of `options.configurations()`. Questions about one image are adjacent."""
    images = [question.image for question in questions]
    asked = images.count(images[0])
    assert images == [name for name in dict.fromkeys(images) for _ in range(asked)], "as many about every image"
    columns = list(options.configurations())
    found = np.zeros((len(questions), len(columns)), np.uint8)
    for start in range(0, len(questions), asked * _MOSAICS_PER_PASS):
        part = questions[start : start + asked * _MOSAICS_PER_PASS]
        for tier in options.crops_by_tier:
            here = [number for number, knobs in enumerate(columns) if knobs.tier == tier]
            paths = [options.block_path(columns[number]) for number in here]
            by_path = _Walk(model, part, asked, tier).answers(list(dict.fromkeys(paths)))
            found[start : start + len(part), here] = np.stack([by_path[path] for path in paths], axis=1)
        say(start + len(part))
    return found


class _Walk:
    """Some mosaics at one tier, with their questions."""

    def __init__(self, model: LlavaForConditionalGeneration, questions: Sequence[Question], asked: int, tier: str):
        self.model, self.text, self.config = model, model.model.language_model, model.config.text_config
        image = _see(model, torch.stack([question.sample.crops_by_tier[tier] for question in questions[::asked]]))
        words = torch.tensor([_padded(question.sample.question_ids) for question in questions]).view(len(image), -1)
        self.embedded = torch.cat([image, model.get_input_embeddings()(words)], dim=1)
        lengths = torch.tensor([len(question.sample.question_ids) for question in questions]).view(len(image), asked)
        self.last = image.shape[1] + torch.arange(asked) * QUESTION_TOKENS + lengths - 1
        self.packing: SharedPrefixLayout = pack(image.shape[1], [QUESTION_TOKENS] * asked)
        self.cos, self.sin = self.text.rotary_emb(self.embedded, self.packing.positions[None])

    def answers(self, paths: Sequence[Path]) -> dict[Path, UInt8[np.ndarray, " questions"]]:
        return self._from(self.embedded, paths, 0)

    def _from(self, hidden: Tensor, paths: Sequence[Path], block: int) -> dict[Path, np.ndarray]:
        if block == len(paths[0]):
            return {paths[0]: self._said(hidden)}
        found: dict[Path, np.ndarray] = {}
        for top_k in dict.fromkeys(path[block] for path in paths):
            after = self._run(hidden, block, top_k) if top_k else hidden
            found |= self._from(after, [path for path in paths if path[block] == top_k], block + 1)
        return found

    def _run(self, hidden: Tensor, block: int, top_k: int) -> Tensor:
        run: BlockPass = block_pass
        output, _ = run(
            hidden,
            *block_weights(self.text.layers[block]),
            self.packing.visible,
            self.cos[0],
            self.sin[0],
            torch.tensor([top_k - 1]),
            self.config.num_experts_per_tok,
            self.config.num_attention_heads,
        )
        return output

    def _said(self, hidden: Float[Tensor, "mosaics tokens width"]) -> UInt8[np.ndarray, " questions"]:
        ends = hidden.gather(1, self.last[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        logits = self.model.lm_head(rms_norm(ends, self.text.norm.weight))
        said: Int64[Tensor, " questions"] = logits.argmax(1)
        return said.numpy().astype(np.uint8)


def _see(
    model: LlavaForConditionalGeneration, crops: Float[Tensor, "mosaics crops 3 side side"]
) -> Float[Tensor, "mosaics tokens width"]:
    found = model.model.get_image_features(pixel_values=crops.flatten(0, 1)).pooler_output
    return torch.stack(list(found)).unflatten(0, crops.shape[:2]).flatten(1, 2)


def _padded(words: Sequence[int]) -> list[int]:
    return [*words, *[PAD_TOKEN] * (QUESTION_TOKENS - len(words))]
