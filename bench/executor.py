"""4 samples x 5 configurations: the executor against the serial loop, one configuration at a time, in one run.

python bench/executor.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, OlmoeConfig, SiglipVisionConfig

from groupwise.workloads.controller.adapter import LlavaAdapter, Sample
from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.executor import Executor, Request
from groupwise.workloads.controller.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.recall import recall

IMAGE_TOKEN = 63
CROPS = {"low": 3, "medium": 6, "high": 12}
OPTIONS = KnobOptions(CROPS, total_blocks=16, full_top_k=8, drop_order=(13, 10, 8, 11))
WIDTH, SIDE, PATCH = 64, 12, 4


def model() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    text = OlmoeConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=16, num_attention_heads=4,
        num_key_value_heads=4, num_experts=16, num_experts_per_tok=8, norm_topk_prob=False,
        max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=3, num_attention_heads=4, num_channels=1,
        image_size=SIDE, patch_size=PATCH, vision_use_head=False,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
        vision_feature_select_strategy="full", tie_word_embeddings=False,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config).eval()


def samples(count: int) -> list[Sample]:
    source = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        overview = torch.randn(1, 1, SIDE, SIDE, generator=source)
        crops = {
            tier: torch.cat([overview, torch.randn(n, 1, SIDE, SIDE, generator=source)]) for tier, n in CROPS.items()
        }
        made.append(Sample(f"sample {number}", crops, tuple(torch.randint(1, 60, (3,), generator=source).tolist())))
    return made


def five_knobs(number: int) -> list[Knobs]:
    source = torch.Generator().manual_seed(number)
    every = list(OPTIONS.all())
    return [every[int(torch.randint(len(every), (), generator=source))] for _ in range(5)]


@torch.inference_mode()
def serial(net: LlavaForConditionalGeneration, requests: Sequence[Request], experts: str) -> list[int]:
    """The loop to beat: one configuration after the other through stock transformers, nothing shared."""
    net.config.text_config._experts_implementation = experts
    text = net.model.language_model
    blocks, answers = text.layers, []
    for request in requests:
        path = OPTIONS.path(request.knobs)
        crops = request.sample.crops[request.knobs.tier]
        ids = [IMAGE_TOKEN] * (len(crops) * (SIDE // PATCH) ** 2) + list(request.sample.question)
        text.layers = nn.ModuleList([block for block, k in zip(blocks, path, strict=True) if k])
        for block, k in zip(blocks, path, strict=True):
            block.mlp.gate.top_k = k or OPTIONS.full_top_k
        result = net(input_ids=torch.tensor([ids]), pixel_values=crops, use_cache=False, logits_to_keep=1)
        answers.append(int(result.logits[0, -1].argmax()))
    text.layers = blocks
    for block in blocks:
        block.mlp.gate.top_k = OPTIONS.full_top_k
    return answers


def seconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def main() -> None:
    torch.set_num_threads(1)
    net = model()
    executor = Executor(LlavaAdapter(net), OPTIONS)
    requests = [Request(sample, knobs) for n, sample in enumerate(samples(4)) for knobs in five_knobs(n)]
    expected = serial(net, requests, "grouped_mm")
    answers, work = executor.answer(requests)
    assert [answer.tokens[0] for answer in answers] == expected
    memory = Answers("bench")
    recall(executor, memory, requests)
    ways: dict[str, Callable[[], object]] = {
        "serial, eager experts": lambda: serial(net, requests, "eager"),
        "serial, grouped_mm (transformers' default)": lambda: serial(net, requests, "grouped_mm"),
        "executor, cold": lambda: executor.answer(requests),
        "executor, remembered": lambda: recall(executor, memory, requests),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            times[name].append(seconds(way))
    serial_ms = 1000 * statistics.median(times["serial, grouped_mm (transformers' default)"])
    print("4 samples x 5 configurations, one thread, median of 5 alternating rounds, measured")
    for name, found in times.items():
        own_ms = 1000 * statistics.median(found)
        print(f"  {name:<44} {own_ms:9.2f} ms  {serial_ms / own_ms:9.2f}x")
    print(f"  work of the executor: {work}")


if __name__ == "__main__":
    main()
