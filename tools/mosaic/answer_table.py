"""The embedded model's answers to all questions of the recipe under every configuration, by the dense forward pass.

All questions about a mosaic follow its image under a block mask, so they cost little more than one. Configurations that
begin with the same blocks share them: a walk over the tree of block paths computes each branch once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.task import Question
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic
from groupwise.workloads.controller.tasks.mosaic.questions import PAD_TOKEN, QUESTION_TOKENS, QUESTION_TYPES
from tools.mosaic.dense_forward import BlockPass, SharedPrefixLayout, block_pass, block_weights, pack, rms_norm

_MOSAICS_PER_PASS = 16
BlockPath = tuple[int, ...]


def answer_in_processes(
    questions: Sequence[Question], options: KnobOptions, *, processes: int, on_progress: Callable[[int], None]
) -> UInt8[np.ndarray, "questions configurations"]:
    """`answer_every_configuration` of the embedded model, some mosaics at a time in each process."""
    size = _MOSAICS_PER_PASS * len(QUESTION_TYPES)
    batches = [questions[first : first + size] for first in range(0, len(questions), size)]
    tokens: list[np.ndarray] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for answered in pool.map(partial(_answer_batch, options), batches):
            tokens.append(answered)
            on_progress(sum(map(len, tokens)))
    return np.concatenate(tokens)


def _answer_batch(options: KnobOptions, questions: Sequence[Question]) -> np.ndarray:
    torch.set_num_threads(1)
    return answer_every_configuration(load_mosaic(), options, questions)


@torch.inference_mode()
def answer_every_configuration(
    model: LlavaForConditionalGeneration, options: KnobOptions, questions: Sequence[Question]
) -> UInt8[np.ndarray, "questions configurations"]:
    """The answers' tokens in the order of `options.configurations()`. Questions about one image must be adjacent."""
    images = [question.image for question in questions]
    per_image = images.count(images[0])
    assert images == [name for name in dict.fromkeys(images) for _ in range(per_image)], "as many about every image"
    configurations = list(options.configurations())
    tokens = np.zeros((len(questions), len(configurations)), np.uint8)
    for start in range(0, len(questions), per_image * _MOSAICS_PER_PASS):
        batch = questions[start : start + per_image * _MOSAICS_PER_PASS]
        for tier in options.crops_by_tier:
            columns = [index for index, knobs in enumerate(configurations) if knobs.tier == tier]
            paths = [options.block_path(configurations[index]) for index in columns]
            by_path = _PathTree(model, batch, per_image, tier).answers(list(dict.fromkeys(paths)))
            tokens[start : start + len(batch), columns] = np.stack([by_path[path] for path in paths], axis=1)
    return tokens


class _PathTree:
    """Some mosaics at one tier, with their questions."""

    def __init__(self, model: LlavaForConditionalGeneration, questions: Sequence[Question], per_image: int, tier: str):
        self.model, self.text, self.config = model, model.model.language_model, model.config.text_config
        image = _image_features(
            model, torch.stack([question.sample.crops_by_tier[tier] for question in questions[::per_image]])
        )
        words = torch.tensor([_padded(question.sample.question_ids) for question in questions]).view(len(image), -1)
        self.embedded = torch.cat([image, model.get_input_embeddings()(words)], dim=1)
        lengths = torch.tensor([len(question.sample.question_ids) for question in questions]).view(
            len(image), per_image
        )
        self.last = image.shape[1] + torch.arange(per_image) * QUESTION_TOKENS + lengths - 1
        self.layout: SharedPrefixLayout = pack(image.shape[1], [QUESTION_TOKENS] * per_image)
        self.cos, self.sin = self.text.rotary_emb(self.embedded, self.layout.positions[None])

    def answers(self, paths: Sequence[BlockPath]) -> dict[BlockPath, UInt8[np.ndarray, " questions"]]:
        return self._answers_from(self.embedded, paths, 0)

    def _answers_from(self, hidden: Tensor, paths: Sequence[BlockPath], block: int) -> dict[BlockPath, np.ndarray]:
        if block == len(paths[0]):
            return {paths[0]: self._answer_tokens(hidden)}
        answers: dict[BlockPath, np.ndarray] = {}
        for top_k in dict.fromkeys(path[block] for path in paths):
            after = self._run_block(hidden, block, top_k) if top_k else hidden
            answers |= self._answers_from(after, [path for path in paths if path[block] == top_k], block + 1)
        return answers

    def _run_block(self, hidden: Tensor, block: int, top_k: int) -> Tensor:
        run: BlockPass = block_pass
        output, _ = run(
            hidden,
            *block_weights(self.text.layers[block]),
            self.layout.visible,
            self.cos[0],
            self.sin[0],
            torch.tensor([top_k - 1]),
            self.config.num_experts_per_tok,
            self.config.num_attention_heads,
        )
        return output

    def _answer_tokens(self, hidden: Float[Tensor, "mosaics tokens width"]) -> UInt8[np.ndarray, " questions"]:
        ends = hidden.gather(1, self.last[..., None].expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
        tokens: Int64[Tensor, " questions"] = self.model.lm_head(rms_norm(ends, self.text.norm.weight)).argmax(1)
        return tokens.numpy().astype(np.uint8)


def _image_features(
    model: LlavaForConditionalGeneration, crops: Float[Tensor, "mosaics crops 3 side side"]
) -> Float[Tensor, "mosaics tokens width"]:
    features = model.model.get_image_features(pixel_values=crops.flatten(0, 1)).pooler_output
    return torch.stack(list(features)).unflatten(0, crops.shape[:2]).flatten(1, 2)


def _padded(tokens: Sequence[int]) -> list[int]:
    return [*tokens, *[PAD_TOKEN] * (QUESTION_TOKENS - len(tokens))]
