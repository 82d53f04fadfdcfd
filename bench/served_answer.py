"""One answer of the embedded model at a time, with the same question and knobs three ways, in one interleaved run.

    stock      transformers' own forward: dropped blocks taken out, top-k set, logits of the last token only
    executor   the executor with these knobs, no controller
    served     ControllerServer, to which only these knobs are feasible: both stages, the latency token and the answer

Prints medians, the ratios of each pair (their median and quartiles), and the controller's own time. The model has
the embedded one's size and random weights: times do not depend on them.

python bench/served_answer.py
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import LlavaForConditionalGeneration

from groupwise.dist.process import configure_process
from groupwise.workloads.controller.model.adapters import LlavaAdapter, Sample
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.server import BudgetLimit, ControllerServer
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
    drop_order=(15, 14, 13, 12),
    max_dropped_blocks=BLOCKS - FEWEST_BLOCKS,
    smallest_top_k=SMALLEST_TOP_K,
)
KNOBS = (
    OPTIONS.full,
    Knobs("high", 5, TOP_K, BLOCKS),
    Knobs("high", 3, 6, 14),
    Knobs("medium", 3, 6, 14),
    Knobs("low", 5, SMALLEST_TOP_K, FEWEST_BLOCKS),
    OPTIONS.cheapest,
)
STOCK, EXECUTOR, SERVED = "stock", "executor", "served"


@dataclass(frozen=True)
class Pair:
    """The times of one question, in milliseconds, and the controller's own within `SERVED`."""

    ms: dict[str, float]
    controller_ms: float

    def ratio(self, way: str, to: str) -> float:
        return self.ms[way] / self.ms[to]


class Ways:
    """The three ways to answer a question with one setting of the knobs."""

    def __init__(self, model: LlavaForConditionalGeneration, knobs: Knobs):
        self.model, self.knobs = model, knobs
        self.executor = Executor(LlavaAdapter(model), OPTIONS)
        self.server = ControllerServer(ControllerNetwork(model.config.text_config.hidden_size, OPTIONS), self.executor)
        index = list(OPTIONS.configurations()).index(knobs)
        bound_ms = torch.full((len(list(OPTIONS.configurations())),), torch.inf)
        bound_ms[index] = 1.0
        self.limit = BudgetLimit(1.0, 0.5, bound_ms.view(OPTIONS.shape))

    def pair(self, sample: Sample, *, stock_first: bool) -> Pair:
        ms, served = {}, None
        ways = (STOCK, EXECUTOR, SERVED) if stock_first else (SERVED, EXECUTOR, STOCK)
        tokens = {}
        for way in ways:
            ms[way], tokens[way] = getattr(self, f"_{way}")(sample)
            if way == SERVED:
                served = tokens[way]
                tokens[way] = served.tokens[0]
        assert served is not None
        assert served.knobs == self.knobs
        assert len(set(tokens.values())) == 1, f"answers differ: {tokens}"
        return Pair(ms, served.controller_ms)

    def _stock(self, sample: Sample) -> tuple[float, int]:
        knobs, tier = self.knobs, Tier(self.knobs.tier)
        kept = [block for block, top_k in enumerate(OPTIONS.block_path(knobs)) if top_k]
        ids, crops = prompt_ids(sample.question_ids, tier), sample.crops_by_tier[knobs.tier]
        with configured(self.model, kept, knobs.top_k, knobs.insertion_position), torch.inference_mode():
            return timed(
                lambda: int(
                    self.model(input_ids=ids, pixel_values=crops, logits_to_keep=1, use_cache=False)
                    .logits[0, -1]
                    .argmax()
                )
            )

    def _executor(self, sample: Sample) -> tuple[float, int]:
        return timed(lambda: self.executor.answer([AnswerRequest(sample, self.knobs)])[0][0].tokens[0])

    def _served(self, sample: Sample) -> tuple[float, object]:
        return timed(lambda: self.server.serve([(sample, self.limit)])[0])


def timed(act: Callable[[], object]) -> tuple[float, object]:
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


def spread(values: Sequence[float], digits: int = 3) -> str:
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def line(knobs: Knobs, pairs: Sequence[Pair]) -> str:
    """Medians and quartiles over the pairs."""
    ms = "  ".join(
        f"{way} {statistics.median(pair.ms[way] for pair in pairs):6.2f}" for way in (STOCK, EXECUTOR, SERVED)
    )
    own = [pair.controller_ms for pair in pairs]
    share = statistics.median(pair.controller_ms / pair.ms[SERVED] for pair in pairs)
    return "\n".join(
        (
            f"{knobs.tier}, position {knobs.insertion_position}, top-{knobs.top_k}, {knobs.blocks} blocks",
            f"  ms                     {ms}",
            f"  executor / stock       {spread([pair.ratio(EXECUTOR, STOCK) for pair in pairs])}",
            f"  served / stock         {spread([pair.ratio(SERVED, STOCK) for pair in pairs])}",
            f"  served / executor      {spread([pair.ratio(SERVED, EXECUTOR) for pair in pairs])}",
            f"  controller's own, ms   {spread(own)}, {share:.2%} of the served answer",
        )
    )


def main(pairs: int = 60) -> None:
    """Print one paragraph a setting of the knobs, and the ratios over all of them.

    Args:
        pairs: Questions per setting.
    """
    configure_process(1)
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(MosaicSize().config()).eval()
    samples, ways = questions(pairs), [Ways(model, knobs) for knobs in KNOBS]
    measured: list[list[Pair]] = [[] for _ in ways]
    gc.disable()
    for number, sample in enumerate([*samples[:3], *samples]):
        for way, found in zip(ways, measured, strict=True):
            found.append(way.pair(sample, stock_first=number % 2 == 0))
    print(f"{pairs} questions a setting, one at a time on one thread: median (quartiles)")
    kept = [found[3:] for found in measured]
    for way, found in zip(ways, kept, strict=True):
        print(line(way.knobs, found))
    everything = [pair for found in kept for pair in found]
    for name, of, to in (
        ("executor / stock", EXECUTOR, STOCK),
        ("served / stock", SERVED, STOCK),
        ("served / executor", SERVED, EXECUTOR),
    ):
        print(f"all settings, {name}: {spread([pair.ratio(of, to) for pair in everything])}")


if __name__ == "__main__":
    tyro.cli(main)
