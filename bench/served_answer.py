"""One answer of the embedded model at a time, with the same question and knobs three ways in random order.

    stock      transformers' own forward: dropped blocks taken out, top-k set, logits of the last token only
    executor   the executor with these knobs, no controller
    served     ControllerServer, to which only these knobs are feasible: both stages, the latency token and the answer

Prints medians and quartiles of the ratios of each question's own times, and the controller's own time. The model has
the embedded one's size and random weights: times do not depend on them.

python bench/served_answer.py
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import tyro
from transformers import LlavaForConditionalGeneration

from groupwise.dist.process import configure_process
from groupwise.workloads.controller.model.adapters import LlavaAdapter, Sample
from groupwise.workloads.controller.model.executor import Answer, AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs, WorkCounts
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.limits import BudgetLimit, LeastBounds, PacedBounds
from groupwise.workloads.controller.serving.server import ControllerServer, ServedAnswer
from groupwise.workloads.controller.tasks.mosaic.model import (
    BLOCKS,
    FEWEST_BLOCKS,
    SMALLEST_TOP_K,
    TOP_K,
    MosaicSize,
    mosaic_sample,
)
from groupwise.workloads.controller.tasks.mosaic.questions import make_question_set
from groupwise.workloads.controller.tasks.mosaic.scene import CROPS, HandwritingSplit, Tier

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from tiny.mosaic import configured, prompt_ids

OPTIONS = KnobOptions(
    crops_by_tier={tier.value: count for tier, count in CROPS.items()},
    total_blocks=BLOCKS,
    full_top_k=TOP_K,
    drop_order=(11, 10, 9, 8),
    max_dropped_blocks=BLOCKS - FEWEST_BLOCKS,
    smallest_top_k=SMALLEST_TOP_K,
)
KNOBS = (
    OPTIONS.full,
    Knobs("high", 5, TOP_K, BLOCKS),
    Knobs("high", 3, 6, 10),
    Knobs("medium", 3, 6, 10),
    Knobs("low", 5, SMALLEST_TOP_K, FEWEST_BLOCKS),
    OPTIONS.cheapest,
)
WAYS = ("stock", "plain", "served")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Times:
    """One question answered in the three ways, in milliseconds of processor time; the controller's own are within
    `served`."""

    stock: float
    executor: float
    served: float
    controller: float


class Ways:
    """The three ways to answer a question with one setting of the knobs. All of them give the same answer."""

    def __init__(self, model: LlavaForConditionalGeneration, knobs: Knobs):
        self.model, self.knobs = model, knobs
        self.executor = Executor(LlavaAdapter(model), OPTIONS)
        network = ControllerNetwork(model.config.text_config.hidden_size, OPTIONS)
        self.server = ControllerServer(network, self.executor, clock=time.thread_time)
        configurations = list(OPTIONS.configurations())
        bound_ms = torch.full((len(configurations),), torch.inf)
        bound_ms[configurations.index(knobs)] = 1.0
        self.limit = BudgetLimit(PacedBounds(LeastBounds(bound_ms.view(OPTIONS.shape))), 1.0, 0.5)

    def time(self, sample: Sample, order: Sequence[str] = WAYS) -> Times:
        timed_ways = {way: getattr(self, way)(sample) for way in order}
        (stock_ms, token), (executor_ms, (answers, _)), (served_ms, (served,)) = (timed_ways[way] for way in WAYS)
        assert served.knobs == self.knobs
        assert served.tokens == answers[0].tokens == (token,)
        return Times(stock_ms, executor_ms, served_ms, served.controller_ms)

    def plain(self, sample: Sample) -> tuple[float, tuple[list[Answer], WorkCounts]]:
        return timed(lambda: self.executor.answer([AnswerRequest(sample, self.knobs)]))

    def served(self, sample: Sample) -> tuple[float, list[ServedAnswer]]:
        return timed(lambda: self.server.serve([(sample, self.limit)]))

    def stock(self, sample: Sample) -> tuple[float, int]:
        knobs, tier = self.knobs, Tier(self.knobs.tier)
        kept = [block for block, top_k in enumerate(OPTIONS.block_path(knobs)) if top_k]
        inputs = {"input_ids": prompt_ids(sample.question_ids, tier), "pixel_values": sample.crops_by_tier[knobs.tier]}
        with configured(self.model, kept, knobs.top_k, knobs.insertion_position), torch.inference_mode():
            return timed(lambda: int(self.model(**inputs, logits_to_keep=1, use_cache=False).logits[0, -1].argmax()))


def timed(act: Callable[[], Result]) -> tuple[float, Result]:
    """Milliseconds of this thread's processor time: other processes of the machine take no part in it."""
    begun = time.thread_time()
    result = act()
    return 1000 * (time.thread_time() - begun), result


def questions(count: int) -> list[Sample]:
    drawn = make_question_set(HandwritingSplit.TEST, 8)
    rows = [(7 * number) % (8 * drawn.questions_per_mosaic) for number in range(count)]
    return [
        mosaic_sample(
            drawn.mosaics.pixels[row // drawn.questions_per_mosaic],
            drawn.questions.tokens[row, : drawn.questions.lengths[row]].tolist(),
        )
        for row in rows
    ]


def spread(values: Iterable[float], form: str = ".3f") -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def summary(title: str, times: Sequence[Times]) -> str:
    """Medians and quartiles over the questions; ratios are of each question's own times."""
    stock, executor, served = (
        statistics.median(getattr(one, way) for one in times) for way in ("stock", "executor", "served")
    )
    return "\n".join(
        (
            f"{title}: stock {stock:.1f} ms, executor {executor:.1f} ms, served {served:.1f} ms",
            f"  executor / stock          {spread(one.executor / one.stock for one in times)}",
            f"  served / stock            {spread(one.served / one.stock for one in times)}",
            f"  served / executor         {spread(one.served / one.executor for one in times)}",
            f"  controller's own time     {spread(one.controller for one in times)} ms",
            f"  its share of the answer   {spread((one.controller / one.served for one in times), '.2%')}",
        )
    )


def main(count: int = 60) -> None:
    """Print the times and ratios of each setting, and of all together.

    Args:
        count: Questions per setting.
    """
    configure_process(1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(MosaicSize().config()).eval()
    samples, ways = questions(count), {knobs: Ways(model, knobs) for knobs in KNOBS}
    times: dict[Knobs, list[Times]] = {knobs: [] for knobs in KNOBS}
    gc.disable()
    for warm_up in samples[:3]:
        for way in ways.values():
            way.time(warm_up)
    source = random.Random(0)
    for sample in samples:
        for knobs, way in ways.items():
            times[knobs].append(way.time(sample, source.sample(WAYS, 3)))
    print(f"{count} questions a setting, one at a time on one thread: median (quartiles)")
    for knobs, measured in times.items():
        title = f"{knobs.tier}, position {knobs.insertion_position}, top-{knobs.top_k}, {knobs.blocks} blocks"
        print(summary(title, measured))
    print(summary("all settings", [one for measured in times.values() for one in measured]))


if __name__ == "__main__":
    tyro.cli(main)
