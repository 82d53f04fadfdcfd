"""4 samples x 5 configurations of the embedded model: the executor against one configuration at a time, in one run.

python bench/executor.py
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlavaForConditionalGeneration

from groupwise.workloads.controller.adapter import LlavaAdapter
from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.executor import Executor, Request
from groupwise.workloads.controller.mosaic.crops import Tier
from groupwise.workloads.controller.mosaic.digits import Split
from groupwise.workloads.controller.mosaic.model import answer_logits, configured, load_mosaic
from groupwise.workloads.controller.mosaic.score.accuracy import make_exam
from groupwise.workloads.controller.mosaic.steer import mosaic_options, mosaic_sample
from groupwise.workloads.controller.recall import recall

OPTIONS = mosaic_options()
SERIAL = "serial, grouped_mm (transformers' default)"


def twenty_requests() -> list[Request]:
    exam, chance, every = make_exam(Split.TEST, 4), random.Random(0), list(OPTIONS.all())
    requests = []
    for number in range(4):
        row = number * exam.questions_per_mosaic + 3 * number
        asked = exam.questions.tokens[row, : exam.questions.lengths[row]].tolist()
        sample = mosaic_sample(exam.mosaics.pixels[number], asked)
        requests += [Request(sample, chance.choice(every)) for _ in range(5)]
    return requests


@torch.inference_mode()
def serial(model: LlavaForConditionalGeneration, requests: Sequence[Request], experts: str) -> list[int]:
    """The loop to beat: one configuration after the other through stock transformers, nothing shared."""
    model.config.text_config._experts_implementation = experts
    answers = []
    for request in requests:
        knobs = request.knobs
        kept = [block for block, top_k in enumerate(OPTIONS.path(knobs)) if top_k]
        with configured(model, kept, knobs.top_k, knobs.insertion_position):
            logits = answer_logits(model, request.sample.crops[knobs.tier], request.sample.question, Tier(knobs.tier))
        answers.append(int(logits.argmax()))
    return answers


def milliseconds(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - begun)


def main() -> None:
    torch.set_num_threads(1)
    model = load_mosaic()
    executor, memory, requests = Executor(LlavaAdapter(model), OPTIONS), Answers("mosaic"), twenty_requests()
    answers, work = executor.answer(requests)
    assert [answer.tokens[0] for answer in answers] == serial(model, requests, "grouped_mm")
    recall(executor, memory, requests)
    ways: dict[str, Callable[[], object]] = {
        "serial, eager experts": lambda: serial(model, requests, "eager"),
        SERIAL: lambda: serial(model, requests, "grouped_mm"),
        "executor, cold": lambda: executor.answer(requests),
        "executor, remembered": lambda: recall(executor, memory, requests),
    }
    rounds = [{name: milliseconds(way) for name, way in ways.items()} for _ in range(9)]
    medians = {name: statistics.median(found[name] for found in rounds) for name in ways}
    print("4 samples x 5 configurations, one thread, median of 9 alternating rounds, measured")
    for name, median in medians.items():
        print(f"  {name:<44} {median:9.2f} ms  {medians[SERIAL] / median:9.2f}x")
    print(f"  work of the executor: {work}")


if __name__ == "__main__":
    main()
