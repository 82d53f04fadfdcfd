"""A model to be measured: what can be asked of it, in which settings, and how one answer is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.core.errors import UserError
from groupwise.workloads.controller.adapter import Sample, adapt
from groupwise.workloads.controller.executor import Executor, Request
from groupwise.workloads.controller.knobs import KnobOptions, Knobs

MOSAIC = "mosaic"
NO_TIER = "text"
_MOSAIC_SAMPLES = 8
_USUAL_CROPS = {"low": 3, "medium": 6, "high": 12}


@dataclass(frozen=True)
class Subject:
    name: str
    model: Any
    settings: tuple[Knobs, ...]
    """The dearest of all among them."""
    answer: Callable[[Knobs, int, int], object]
    """Give one answer in a setting: (knobs, number of the run, tokens)."""

    @property
    def full(self) -> Knobs:
        """The finest tier with all blocks and experts."""
        return max(self.settings, key=lambda knobs: (knobs.blocks, knobs.top_k, self.tiers.index(knobs.tier)))

    @property
    def tiers(self) -> list[str]:
        """From coarse to fine."""
        return list(dict.fromkeys(knobs.tier for knobs in self.settings))


def load_subject(name: str, *, prompt_tokens: int) -> Subject:
    """The embedded model by its name, any other by its folder. Prompts of the latter are random, of this length."""
    if name == MOSAIC:
        return _mosaic()
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"There is no model '{name}': no such folder, or no config.json in it. Name `{MOSAIC}`, the embedded model,"
            " or a folder that save_pretrained() of transformers has written."
        )
    model = load_folder(folder)
    if getattr(model.config, "vision_config", None) is None:
        return _text_alone(name, model, prompt_tokens)
    return _with_tiers(name, model, prompt_tokens)


def load_folder(folder: Path) -> Any:
    """The model that transformers has saved in a folder, on the accelerator where there is one."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        sees = getattr(config, "vision_config", None) is not None
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(
            f"The model in {folder} cannot be loaded: {' '.join(str(error).split())} Name a folder that"
            " save_pretrained() of transformers has written, weights included."
        ) from error
    return model.eval().to(_device())


def steered(name: str, model: Any, options: KnobOptions, samples: list[Sample]) -> Subject:
    """A model under the executor. Every run asks another sample, so that no single one decides."""
    executor = Executor(adapt(model), options)

    def answer(knobs: Knobs, run: int, tokens: int) -> object:
        return executor.answer([Request(samples[run % len(samples)], knobs)], max_new_tokens=tokens)

    return Subject(name, model, _grid(options), answer)


def _grid(options: KnobOptions) -> tuple[Knobs, ...]:
    """Every tier at every depth with all experts, and at every top-k with all blocks."""
    full = options.full
    by_depth = [
        Knobs(tier, full.insertion_position, full.top_k, blocks)
        for tier in options.crops
        for blocks in options.block_totals
    ]
    by_top_k = [
        Knobs(tier, full.insertion_position, top_k, full.blocks) for tier in options.crops for top_k in options.top_ks
    ]
    return tuple(dict.fromkeys([*by_depth, *by_top_k]))


def _mosaic() -> Subject:
    from groupwise.workloads.controller.mosaic.digits import Split
    from groupwise.workloads.controller.mosaic.model import load_mosaic
    from groupwise.workloads.controller.mosaic.score.accuracy import make_exam
    from groupwise.workloads.controller.mosaic.steer import mosaic_options, mosaic_sample

    exam = make_exam(Split.TEST, _MOSAIC_SAMPLES)
    samples = []
    for number in range(_MOSAIC_SAMPLES):
        row = number * exam.questions_per_mosaic + number % exam.questions_per_mosaic
        asked = exam.questions.tokens[row, : exam.questions.lengths[row]].tolist()
        samples.append(_placed(mosaic_sample(exam.mosaics.pixels[number], asked), torch.float32))
    return steered(MOSAIC, load_mosaic().to(_device()), mosaic_options(), samples)


def _with_tiers(name: str, model: Any, prompt_tokens: int) -> Subject:
    """Noise for images and words: what an answer costs does not depend on what is in them.

    Nor does it depend on which blocks are dropped, so no importance is asked for: the last go first.
    """
    adapter, source = adapt(model), torch.Generator().manual_seed(0)
    vision, words = model.config.vision_config, adapter.text_config.vocab_size
    total, top_k = len(adapter.blocks), getattr(adapter.text_config, "num_experts_per_tok", None) or 1
    options = KnobOptions(
        crops=_USUAL_CROPS,
        total_blocks=total,
        full_top_k=top_k,
        drop_order=tuple(reversed(range(1, total))),
        insertion_positions=(1,),
        most_dropped=min(4, total - 1),
        smallest_top_k=max(1, top_k // 2),
    )
    shape = (1 + max(_USUAL_CROPS.values()), getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
    pixels = torch.randn(shape, generator=source)
    question = tuple(torch.randint(words, (prompt_tokens,), generator=source).tolist())
    crops = {tier: pixels[: 1 + count] for tier, count in _USUAL_CROPS.items()}
    return steered(name, model, options, [_placed(Sample("noise", crops, question), model.dtype)])


def _text_alone(name: str, model: Any, prompt_tokens: int) -> Subject:
    """A model without eyes has no tiers and is not steered: `generate` answers as it is."""
    config = model.config
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(config.vocab_size, (1, prompt_tokens), generator=source).to(_device())
    only = Knobs(NO_TIER, 1, getattr(config, "num_experts_per_tok", None) or 1, config.num_hidden_layers)

    def answer(_: Knobs, __: int, tokens: int) -> object:
        exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **exactly)

    return Subject(name, model, (only,), answer)


def _placed(sample: Sample, dtype: torch.dtype) -> Sample:
    crops = {tier: pixels.to(_device(), dtype) for tier, pixels in sample.crops.items()}
    return Sample(sample.name, crops, sample.question)


def _device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
