"""4 samples x 5 configurations of the embedded model: the executor against one configuration at a time, in one run.

The serial loop does for each configuration what a rollout needs: the latency token (vision and the blocks before the
insertion position), then the answer by `generate`, both with stock transformers. Ends with where the executor's time
goes, against the rate at which this core multiplies large matrices.

python bench/executor.py
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlavaForConditionalGeneration

from groupwise.dist.process import configure_process
from groupwise.workloads.controller.model.adapters import LlavaAdapter
from groupwise.workloads.controller.model.answer_cache import AnswerCache, answer_with_cache
from groupwise.workloads.controller.model.executor import Answer, AnswerRequest, Executor, PrefixItem
from groupwise.workloads.controller.model.knobs import WorkCounts
from groupwise.workloads.controller.tasks.mosaic.model import load_mosaic, mosaic_options, mosaic_sample
from groupwise.workloads.controller.tasks.mosaic.questions import PAD_TOKEN, make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import HandwritingSplit, Tier

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tiny.mosaic import configured, prompt_ids

OPTIONS = mosaic_options()
SERIAL = "serial: latency token, then generate"
COLD = "executor, cold"
PRODUCTS = "matrix products"
OPERATORS = {
    PRODUCTS: ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "routing and moving rows": (
        *("aten::topk", "aten::sort", "aten::nonzero", "aten::index", "aten::index_select", "aten::cat"),
        *("aten::_embedding_bag", "aten::bincount", "aten::copy_", "aten::cumsum", "aten::scatter_"),
    ),
}


def twenty_requests() -> list[AnswerRequest]:
    drawn, rng, configurations = (
        make_question_set(HandwritingSplit.TEST, 4),
        random.Random(0),
        list(OPTIONS.configurations()),
    )
    requests = []
    for mosaic in range(4):
        row = mosaic * drawn.questions_per_mosaic + 3 * mosaic
        question_ids = drawn.questions.tokens[row, : drawn.questions.lengths[row]].tolist()
        sample = mosaic_sample(drawn.mosaics.pixels[mosaic], question_ids)
        requests += [AnswerRequest(sample, rng.choice(configurations)) for _ in range(5)]
    return requests


@torch.inference_mode()
def latency_token(model: LlavaForConditionalGeneration, request: AnswerRequest) -> torch.Tensor:
    """The state of one more token after the blocks before the insertion position."""
    knobs, seen = request.knobs, list[torch.Tensor]()
    last_block = model.model.language_model.layers[knobs.insertion_position - 1]
    hook = last_block.register_forward_hook(lambda _, __, output: seen.append(output))
    with configured(model, range(knobs.insertion_position), OPTIONS.full_top_k):
        ids = prompt_ids([*request.sample.question_ids, PAD_TOKEN], Tier(knobs.tier))
        model.model(input_ids=ids, pixel_values=request.sample.crops_by_tier[knobs.tier], use_cache=False)
    hook.remove()
    return seen[0][0, -1]


@torch.inference_mode()
def generated(model: LlavaForConditionalGeneration, request: AnswerRequest) -> int:
    knobs = request.knobs
    kept = [block for block, top_k in enumerate(OPTIONS.block_path(knobs)) if top_k]
    with configured(model, kept, knobs.top_k, knobs.insertion_position):
        ids = prompt_ids(request.sample.question_ids, Tier(knobs.tier))
        pixels = request.sample.crops_by_tier[knobs.tier]
        return int(model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=1, do_sample=False)[0, -1])


def together(
    executor: Executor, requests: Sequence[AnswerRequest]
) -> tuple[list[Answer], WorkCounts, list[torch.Tensor]]:
    """The same for all of them in one batch: the latency tokens, then the answers."""
    items = {request.prompt_key: PrefixItem([request.sample], request.knobs.tier) for request in requests}
    prefix = executor.run_prefix(list(items.values()), executor.adapter.embed(torch.tensor([PAD_TOKEN]))[0])
    tokens = [prefix.latency_tokens[request.prompt_key][request.knobs.insertion_position] for request in requests]
    answers, work = executor.answer(requests, prefix=prefix)
    return answers, prefix.computed.counter.counts + work, tokens


def milliseconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - begun)


def gemm_rate() -> float:
    """Floating point operations a second in products of 1024 x 1024 matrices."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / (min(milliseconds(lambda: left @ right) for _ in range(9)) / 1000)


def where_time_goes(executor: Executor, requests: Sequence[AnswerRequest]) -> Mapping[str, float]:
    """Milliseconds by kind of operator, and what the matrix products alone would take at the GEMM rate."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiled:
        begun = time.perf_counter()
        together(executor, requests)
        whole = 1000 * (time.perf_counter() - begun)
    events = profiled.key_averages()
    by_name = {event.key: event.self_cpu_time_total / 1000 for event in events}
    flops = sum(event.flops for event in events if event.key in OPERATORS[PRODUCTS])
    spent = {kind: sum(by_name.get(name, 0.0) for name in names) for kind, names in OPERATORS.items()}
    spent["other operators"] = sum(by_name.values()) - sum(spent.values())
    spent["Python between them"] = whole - sum(by_name.values())
    return spent | {f"{PRODUCTS}, {flops / 1e9:.1f} GFLOP at the GEMM rate": 1000 * flops / gemm_rate()}


def main() -> None:
    configure_process(1)
    model = load_mosaic()
    model.generation_config.pad_token_id = PAD_TOKEN
    executor, cache, requests = Executor(LlavaAdapter(model), OPTIONS), AnswerCache("mosaic"), twenty_requests()
    answers, work, tokens = together(executor, requests)
    assert [answer.tokens[0] for answer in answers] == [generated(model, request) for request in requests]
    torch.testing.assert_close(tokens, [latency_token(model, request) for request in requests], atol=1e-4, rtol=1e-4)
    answer_with_cache(executor, cache, requests)
    ways: dict[str, Callable[[], object]] = {
        SERIAL: lambda: [(latency_token(model, request), generated(model, request)) for request in requests],
        "serial: answers only": lambda: [generated(model, request) for request in requests],
        COLD: lambda: together(executor, requests),
        "executor, cold, answers only": lambda: executor.answer(requests),
        "executor, cached": lambda: answer_with_cache(executor, cache, requests),
    }
    rounds = [{name: milliseconds(way) for name, way in ways.items()} for _ in range(9)]
    medians = {name: statistics.median(times[name] for times in rounds) for name in ways}
    print("4 samples x 5 configurations, one thread, median of 9 alternating rounds, measured")
    for name, median in medians.items():
        print(f"  {name:<48} {median:9.2f} ms  {medians[SERIAL] / median:9.2f}x")
    print(f"  ratio of each round: {', '.join(f'{times[SERIAL] / times[COLD]:.1f}' for times in rounds)}")
    print(f"  work of the executor: {work}")
    print("where a cold call's time goes, profiled")
    for name, spent in where_time_goes(executor, requests).items():
        print(f"  {name:<48} {spent:9.2f} ms")


if __name__ == "__main__":
    main()
