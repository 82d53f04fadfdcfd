"""The controller as a workload: a condition is a question and a budget, a rollout is a row of four decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from groupwise.core.placement import RolloutRows
from groupwise.core.types import RewardTerms, Rollouts, Scores, concatenate_rollouts
from groupwise.rewards.call import call_rewards
from groupwise.workloads.base import Workload
from groupwise.workloads.controller.conditions import make_conditions, value_of_choices
from groupwise.workloads.controller.config import ControllerConfig
from groupwise.workloads.controller.model.executor import AnswerRequest, PrefixStates
from groupwise.workloads.controller.policy.decide import (
    DECISIONS,
    Controller,
    choices_to_knobs,
    greedy_option,
    replay_option,
    sample_option,
)
from groupwise.workloads.controller.policy.hidden_states import HiddenStateCache
from groupwise.workloads.controller.policy.network import ControllerNetwork
from groupwise.workloads.controller.rewards import (
    ACCURACY,
    check_annotators,
    cost_table,
    penalty_terms,
    reward_functions,
)
from groupwise.workloads.controller.serving.files import settings_from_task, settings_to_files
from groupwise.workloads.controller.task import Question, Task


class ControllerWorkload(Workload):
    """Trains the knobs of a frozen model; its answers and hidden states are computed once and remembered."""

    def __init__(self, task: Task, config: ControllerConfig, device: torch.device):
        from groupwise.workloads.controller.report import ControllerReporter

        self.reporter = ControllerReporter(self)
        self.task, self.config, self.options = task, config, task.executor.options
        every = (*task.questions, *task.held_out)
        check_annotators(config.rewards, [question.answers for question in every])
        self._functions = reward_functions(config.rewards)
        self.cost = cost_table(self.options)
        self.training = make_conditions(task.questions, task.estimator, self.options, config.budget)
        self.held_out = make_conditions(task.held_out, task.estimator, self.options, config.budget)
        self.num_conditions = len(self.training)
        hidden_states = HiddenStateCache(task.executor)
        self.policy = ControllerNetwork(hidden_states.width, self.options, seed=config.policy_seed).to(device)
        self.controller = Controller(self.policy, hidden_states, device)
        self.introduce(every)
        self.row_limits = {"eval_rows": config.eval_rows_per_pass}

    def introduce(self, questions: Sequence[Question]) -> None:
        """Let questions about one picture be looked at together, if their answers are there already."""
        shipped = self.task.answers.precomputed
        if shipped is not None:
            known = [question for question in questions if shipped.get_all(question.sample.name) is not None]
            self.controller.hidden_states.register(known)

    def rollout(self, rows: RolloutRows) -> Rollouts:
        """Decide and answer, `rows_per_pass` at a time: as many as the rank has, and all of it is one batch."""
        return concatenate_rollouts([self._rollout(part) for part in rows.passes()])

    def _rollout(self, rows: RolloutRows) -> Rollouts:
        chances = torch.cat([rows.uniform(decision) for decision in range(len(DECISIONS))], dim=1)
        decided = self.controller.decide(self.training, rows.condition, sample_option(chances))
        return Rollouts(
            self.training.group_ids[rows.condition],
            decided.logp,
            decided.has_choice,
            {
                "condition": rows.condition,
                "choices": decided.choices,
                "answer": self.answer(self.training.question_of(rows.condition), decided.choices, decided.prefix),
            },
        )

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        rows, choices, said = (rollouts.data[name] for name in ("condition", "choices", "answer"))
        medians, _ = self.training.estimates(rows)
        graded = self.grade_answers(self.training.question_of(rows), said)
        rest = self.terms_of(
            value_of_choices(medians, choices) / self.training.budget_ms[rows], self.cost[choices.unbind(1)]
        )
        return RewardTerms({**graded.per_rollout, **rest}, graded.failures)

    def score(self, rollouts: Rollouts) -> Scores:
        choices = rollouts.data["choices"]
        decided = self.controller.decide(self.training, rollouts.data["condition"], replay_option(choices))
        return Scores(decided.logp, entropy=decided.entropy)

    def evaluate(self) -> Mapping[str, float]:
        """Greedy choices on held-out questions under every budget; latency is estimated, not measured."""
        budgets = self.config.budget.budgets
        impossible = torch.cat([self.training.impossible, self.held_out.impossible])
        accuracy, over, ms = (torch.cat(column).view(-1, len(budgets)) for column in zip(*self._greedy(), strict=True))
        return {
            "accuracy, greedy": accuracy.nanmean().item(),
            **{f"accuracy at {budget}": accuracy[:, nth].nanmean().item() for nth, budget in enumerate(budgets)},
            "estimated over budget": over.mean().item(),
            "estimated ms": ms.mean().item(),
            "conditions that nothing fits": impossible.double().mean().item(),
        }

    def _greedy(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        found = []
        for rows in torch.arange(len(self.held_out)).split(self.row_limits["eval_rows"]):
            decided = self.controller.decide(self.held_out, rows, greedy_option)
            questions, choices = self.held_out.question_of(rows), decided.choices
            said = self.answer(questions, choices, decided.prefix)
            accuracy = self.grade_answers(questions, said).per_rollout[ACCURACY]
            medians, _ = self.held_out.estimates(rows)
            found.append(
                (accuracy, self.held_out.over_budget(rows, choices).double(), value_of_choices(medians, choices))
            )
        return found

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """A checkpoint tells what `AdaptiveModel` needs besides the weights."""
        if self.task.source is None:
            return {}
        return settings_to_files(settings_from_task(self.task, self.training, self.controller.hidden_states.width))

    def answer(
        self, questions: Sequence[Question], choices: Int64[Tensor, "rows 4"], prefix: PrefixStates | None = None
    ) -> list[str]:
        """What the model says under these knobs, all together."""
        knobs = choices_to_knobs(self.options, choices)
        requests = [AnswerRequest(question.sample, each) for question, each in zip(questions, knobs, strict=True)]
        return self.task.answer(requests, prefix)

    def grade_answers(self, questions: Sequence[Question], answers: Sequence[str]) -> RewardTerms:
        """Accuracy and any further reward function of each answer; missing where a function failed."""
        return call_rewards(
            self._functions,
            [question.text for question in questions],
            list(answers),
            answers=[list(question.answers) for question in questions],
            images=[question.image for question in questions],
        )

    def terms_of(self, ratio: Float[Tensor, "*rows"], cost: Float[Tensor, "*rows"]) -> dict[str, Tensor]:
        """The terms of a configuration. Within a guaranteed budget time has no price: only the configuration has."""
        return {**({} if self.config.budget.guaranteed else penalty_terms(ratio)), "compute_cost": cost}
