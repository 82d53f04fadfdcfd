"""A model with its trained controller: asked with a budget, it chooses its own knobs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from jaxtyping import Float, Int64
from safetensors.torch import save
from torch import Tensor

from groupwise.core.errors import UserError, require
from groupwise.dist.process import keep_heap_memory
from groupwise.latency.meter import LatencyMeter, find_model_parts
from groupwise.latency.records import EstimatedLatency, Timing
from groupwise.workloads.checkpoint_files import AVERAGED_WEIGHTS, WEIGHTS, newest_valid_checkpoint
from groupwise.workloads.controller.conditions import Conditions, build_conditions, relative_budgets
from groupwise.workloads.controller.latency.estimates import (
    KnobLatencyEstimator,
    KnobLatencyModel,
    KnobTable,
    LatencyTables,
    latency_tables,
)
from groupwise.workloads.controller.latency.source import profile_samples, recalibrate
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixStates, PromptKey
from groupwise.workloads.controller.model.inputs import ImageInput, make_question, speller
from groupwise.workloads.controller.model.knobs import Knobs
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.policy.decide import Controller, HiddenStateCache, choices_to_knobs, greedy_option
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.serving.files import (
    CONFIG,
    ControllerSettings,
    load_policy,
    read_config,
    read_settings,
    settings_to_files,
    source_of,
)
from groupwise.workloads.controller.serving.server import ControllerServer, budget_limit
from groupwise.workloads.controller.task import Question

_POLICY = "model.safetensors"
_SHORTEST_MS = 1e-9
GenerateRequest = tuple[ImageInput, str, float]
"""An image, a question, and a budget in milliseconds."""


@dataclass(frozen=True)
class Reply:
    answer: str
    knobs: Knobs
    """What the controller chose."""
    budget_ms: float
    expected: EstimatedLatency
    """What these knobs were estimated to take, alone."""
    measured: Timing
    """What it took, from pixels and tokens to the last token, the controller's choices included. In a batch: the whole
    batch, since all of its answers are there when it ends."""
    fits: bool
    """Whether the estimate keeps the budget: the high quantile if the controller was trained to guarantee it, else the
    median. False only after a best effort, or where the controller may overrun by choice."""
    together: int = 1
    """How many requests were answered in the same batch."""


class AdaptiveModel:
    """Load one with `load` or `from_pretrained`."""

    def __init__(self, loaded: LoadedModel, settings: ControllerSettings, policy: ControllerNetwork):
        keep_heap_memory()  # as in the process that the estimator was fitted in
        self.loaded, self.settings = replace(loaded, options=settings.options), settings
        executor = Executor(loaded.adapter, settings.options)
        device = loaded.model.device
        self.controller = Controller(policy.to(device), UncachedStates(executor), device)
        self._server = ControllerServer(
            self.controller, max_new_tokens=settings.max_new_tokens, stop_token=settings.stop_token
        )
        self._executor, self._meter, self._spell = (
            executor,
            LatencyMeter(find_model_parts(loaded.model)),
            speller(loaded),
        )
        self._costs: dict[tuple[int, ...], LatencyTables] = {}

    @classmethod
    def load(
        cls,
        run: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        estimator_anyway: bool = False,
    ) -> Self:
        """The newest good checkpoint of a run; its averaged weights where the run kept some."""
        found = newest_valid_checkpoint(Path(run) / "checkpoints", warnings.warn)
        if found is None:
            raise UserError(f"{run} holds no checkpoint. Name the folder of a run that `groupwise train` has written.")
        if not (found / CONFIG).is_file():
            raise UserError(
                f"The run {run} has trained no controller that can be used by itself: {found.name} has no {CONFIG}."
                " Name a run of `groupwise train controller`; a task of your own needs a `source`."
            )
        averaged = found / AVERAGED_WEIGHTS
        weights = averaged if averaged.is_file() else found / WEIGHTS
        return cls._from(found, weights, model, estimator, estimator_anyway)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path | str,
        *,
        model: LoadedModel | Path | str | None = None,
        estimator: KnobLatencyModel | None = None,
        estimator_anyway: bool = False,
    ) -> Self:
        """What `save_pretrained` has written. The frozen model is loaded by its name unless it is given."""
        return cls._from(Path(folder), Path(folder) / _POLICY, model, estimator, estimator_anyway)

    @classmethod
    def _from(
        cls,
        folder: Path,
        weights: Path,
        model: LoadedModel | Path | str | None,
        estimator: KnobLatencyModel | None,
        anyway: bool,
    ) -> Self:
        config = read_config(folder)
        if not isinstance(model, LoadedModel):
            source = source_of(config)
            model = load_model(model or source.model, dtype=getattr(torch, source.dtype))
        settings = read_settings(folder, config, model, estimator=estimator, anyway=anyway)
        return cls(model, settings, load_policy(weights, settings))

    def save_pretrained(self, folder: Path | str) -> None:
        """Write config.json, model.safetensors and, where the estimator was fitted, estimator.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in settings_to_files(self.settings).items():
            (folder / name).write_bytes(raw)
        weights = {name: weight.detach().cpu().contiguous() for name, weight in self.policy.state_dict().items()}
        (folder / _POLICY).write_bytes(save(weights, metadata={"format": "pt"}))

    @property
    def policy(self) -> ControllerNetwork:
        return self.controller.policy

    def recalibrate(self, answers: int = 100) -> float:
        """Time so many answers, so that budgets are kept at the pace that this machine has now.

        Returns how many times as long they took as was estimated.
        """
        known = self.settings.estimator
        if not isinstance(known, KnobLatencyEstimator):
            raise UserError(
                f"This controller keeps its budgets by {type(known).__name__}, which knows no machine: there is nothing"
                " to recalibrate. Load it with estimator=KnobEstimator(...), fitted by `groupwise profile`."
            )
        estimator, pace = recalibrate(known, self._executor, profile_samples(self.loaded), answers=answers)
        self.settings = replace(self.settings, estimator=estimator)
        self._costs.clear()
        return pace

    def generate(self, image: ImageInput, question: str, budget_ms: float, *, best_effort: bool = False) -> Reply:
        """Answer within the budget. One that nothing fits is refused, or met by the cheapest knobs as a best effort."""
        return self.generate_batch([(image, question, budget_ms)], best_effort=best_effort)[0]

    def generate_batch(self, inquiries: Sequence[GenerateRequest], *, best_effort: bool = False) -> list[Reply]:
        """Answer (image, question, budget_ms) of any mix together; knobs and answers are those of each alone."""
        for each in inquiries:
            if not isinstance(each, tuple) or len(each) != 3:
                raise UserError(f"A request is {each!r}: it must be a tuple (image, question, budget_ms).")
        questions = [make_question(*each[:2], self.loaded, prompt=self.settings.source.prompt) for each in inquiries]
        return self.reply(questions, [each[2] for each in inquiries], best_effort=best_effort)

    @torch.inference_mode()
    def reply(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], *, best_effort: bool = False
    ) -> list[Reply]:
        """The same for questions that are ready for the model."""
        if not questions:
            return []
        for budget_ms in budgets_ms:
            _check_budget(budget_ms, best_effort=best_effort)
        done: list[tuple[list[Knobs], list[bool], list[str]]] = []
        measured = self._meter.time(lambda: done.append(self._answer(questions, budgets_ms, best_effort)))
        rows = zip(questions, budgets_ms, *done[0], strict=True)
        return [
            Reply(said, knobs, float(budget_ms), self._expected(question, knobs), measured, fits, len(questions))
            for question, budget_ms, knobs, fits, said in rows
        ]

    def _answer(
        self, questions: Sequence[Question], budgets_ms: Sequence[float], best_effort: bool
    ) -> tuple[list[Knobs], list[bool], list[str]]:
        promised_ms = [self._cost(question).promised_ms(guaranteed=self._guaranteed) for question in questions]
        limits_ms = [max(float(budget_ms), _SHORTEST_MS) for budget_ms in budgets_ms]
        for nth, (promised, limit_ms) in enumerate(zip(promised_ms, limits_ms, strict=True)):
            if not best_effort and not (promised <= limit_ms).any():
                raise self._conditions(questions, promised_ms, limits_ms).infeasible_budget_error(
                    nth, remedy="best_effort=True"
                )
        if len(questions) == 1:
            share = self._share(promised_ms[0], limits_ms[0])
            allowance = budget_limit(promised_ms[0], limits_ms[0], share, guaranteed=self._guaranteed)
            served = self._server.serve(questions[0].sample, allowance)
            choices, said = [served.choices], [served.tokens]
        else:
            choices, said = self._together(questions, self._conditions(questions, promised_ms, limits_ms))
        fits = [
            bool(promised[choice] <= limit_ms)
            for promised, choice, limit_ms in zip(promised_ms, choices, limits_ms, strict=True)
        ]
        return (
            choices_to_knobs(self.settings.options, torch.tensor(choices)),
            fits,
            [self._spell(tokens) for tokens in said],
        )

    def _together(
        self, questions: Sequence[Question], conditions: Conditions
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        decided = self.controller.decide(conditions, torch.arange(len(questions)), greedy_option)
        knobs = choices_to_knobs(self.settings.options, decided.choices)
        found, _ = self._executor.answer(
            [AnswerRequest(question.sample, each) for question, each in zip(questions, knobs, strict=True)],
            prefix=decided.prefix,
            max_new_tokens=self.settings.max_new_tokens,
            stop_token=self.settings.stop_token,
        )
        return [tuple(row) for row in decided.choices.tolist()], [each.tokens for each in found]

    def _conditions(
        self, questions: Sequence[Question], promised_ms: Sequence[KnobTable], limits_ms: Sequence[float]
    ) -> Conditions:
        """Every question under its own budget alone."""
        config = replace(self.settings.budget, values=(limits_ms[0],), unit="ms")
        known = [self._cost(question) for question in questions]
        limits = torch.tensor(limits_ms, dtype=torch.float64)[:, None]
        shares = [self._share(*each) for each in zip(promised_ms, limits_ms, strict=True)]
        made = build_conditions(questions, config, known, torch.arange(len(questions)), limits)
        return replace(made, relative_budget=torch.tensor(shares, dtype=torch.float64))

    def _share(self, promised_ms: KnobTable, limit_ms: float) -> float:
        """What the network is told of a budget: the nearest that it was trained on. Beyond the largest, what was
        learned for that one is better than a guess. A smaller one is told as it is where nothing but the network keeps
        it; else the limit does.
        """
        share = relative_budgets(promised_ms[None], torch.tensor([[limit_ms]], dtype=torch.float64)).item()
        smallest, largest = self.settings.trained_shares
        return min(max(share, smallest) if self._guaranteed else share, largest)

    @property
    def _guaranteed(self) -> bool:
        return self.settings.budget.is_hard

    def _cost(self, question: Question) -> LatencyTables:
        """Estimates depend on the prompt's length alone, so they are kept."""
        lengths = tuple(question.prompt_tokens.values())
        if lengths not in self._costs:
            settings = self.settings
            found = latency_tables(settings.estimator, settings.options, question.prompt_tokens, settings.budget.scope)
            self._costs[lengths] = found
        return self._costs[lengths]

    def _expected(self, question: Question, knobs: Knobs) -> EstimatedLatency:
        return self.settings.estimator.estimate(question.prompt_tokens, [knobs])[0]


def _check_budget(budget_ms: float, *, best_effort: bool) -> None:
    number = isinstance(budget_ms, int | float) and not isinstance(budget_ms, bool) and math.isfinite(budget_ms)
    require(
        number and (best_effort or budget_ms > 0), "budget_ms", budget_ms, "a finite number above 0, in milliseconds"
    )


class UncachedStates(HiddenStateCache):
    """Nothing is known beforehand and nothing is kept: the chosen tier alone runs, up to the chosen position."""

    def prompts(self, questions: Sequence[Question]) -> Float[Tensor, "rows width"]:
        return torch.stack([self.embed(torch.tensor(question.sample.question)) for question in questions])

    def latency_tokens(
        self, questions: Sequence[Question], tiers: Int64[Tensor, " rows"], positions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "rows width"], PrefixStates | None]:
        options = self.executor.options
        names, offered = list(options.crops), list(options.insertion_positions)
        heads = [(question.sample, names[tier]) for question, tier in zip(questions, tiers.tolist(), strict=True)]
        keys: list[PromptKey] = [(sample.name, tier) for sample, tier in heads]
        wanted = [offered[nth] for nth in positions.tolist()]
        last = {key: max(at for each, at in zip(keys, wanted, strict=True) if each == key) for key in keys}
        distinct = dict(zip(keys, heads, strict=True))
        prefix = self.executor.prefix(list(distinct.values()), positions=[last[key] for key in distinct])
        reached = {key: [position for position in offered if position <= last[key]] for key in distinct}
        states = [prefix.latency_tokens[key][reached[key].index(at)] for key, at in zip(keys, wanted, strict=True)]
        return torch.stack(states).float(), prefix
