"""The controller as a workload: a condition is a question and a budget, a rollout is four decisions about knobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from groupwise.core.placement import RolloutRows
from groupwise.core.types import RewardTerms, Rollouts, Scores, concatenate_rollouts
from groupwise.workloads.base import Workload
from groupwise.workloads.controller.conditions import check_some_fit, make_conditions, value_of_choices
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
    grade_answers,
    penalty_terms,
    reward_functions,
)
from groupwise.workloads.controller.serving.files import settings_from_task, settings_to_files
from groupwise.workloads.controller.task import Question, Task


class ControllerWorkload(Workload):
    """Trains the choice of a frozen model's knobs; answers and hidden states are computed once and cached."""

    def __init__(self, task: Task, config: ControllerConfig, device: torch.device):
        from groupwise.workloads.controller.report import ControllerReporter

        self.reporter = ControllerReporter(self)
        self.task, self.config, self.options = task, config, task.executor.options
        questions = (*task.questions, *task.held_out)
        check_annotators(config.rewards, [question.answers for question in questions])
        self._functions = reward_functions(config.rewards)
        self.compute_cost = cost_table(self.options)
        self.training = make_conditions(task.questions, task.estimator, self.options, config.budget)
        check_some_fit(self.training)
        self.held_out = make_conditions(task.held_out, task.estimator, self.options, config.budget)
        self.num_conditions, self.num_held_out = len(self.training), len(self.held_out)
        hidden_states = HiddenStateCache(task.executor)
        sees_overview = config.stage1.sees_overview
        network = ControllerNetwork(
            hidden_states.width, self.options, sees_overview=sees_overview, seed=config.policy_seed
        )
        self.policy = network.to(device)
        self.controller = Controller(self.policy, hidden_states, device)
        self.register_precomputed(questions)
        self.row_limits = {"eval_rows": config.eval_rows}

    @property
    def eval_rows(self) -> int:
        """Rows in one batch of an evaluation; halved after an out-of-memory error."""
        return self.row_limits["eval_rows"]

    def register_precomputed(self, questions: Sequence[Question]) -> None:
        """Let questions about one image share its prefill, if their answers are precomputed."""
        shipped = self.task.answers.precomputed
        if shipped is not None:
            known = [question for question in questions if shipped.get_all(question.sample.name) is not None]
            self.controller.hidden_states.register(known)

    def rollout(self, rows: RolloutRows) -> Rollouts:
        """Decide and answer, `rows_per_pass` rows at a time."""
        return concatenate_rollouts([self._rollout(part) for part in rows.passes()])

    def _rollout(self, rows: RolloutRows) -> Rollouts:
        uniforms = torch.cat([rows.uniform(decision) for decision in range(len(DECISIONS))], dim=1)
        decided = self.controller.decide(self.training, rows.condition, sample_option(uniforms))
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

    def expected_costs(self, conditions: Tensor) -> Tensor:
        """The budget: the larger it is, the more crops and blocks a row may take."""
        return self.training.budget_ms[conditions]

    def rewards(self, rollouts: Rollouts) -> RewardTerms:
        rows, choices, answers = (rollouts.data[name] for name in ("condition", "choices", "answer"))
        medians, _ = self.training.estimates(rows)
        graded = self.grade(self.training.question_of(rows), answers)
        budget_ratio = value_of_choices(medians, choices) / self.training.budget_ms[rows]
        other_terms = self.latency_terms(budget_ratio, self.compute_cost[choices.unbind(1)])
        return RewardTerms({**graded.per_rollout, **other_terms}, graded.failures)

    def score(self, rollouts: Rollouts) -> Scores:
        choices = rollouts.data["choices"]
        decided = self.controller.decide(self.training, rollouts.data["condition"], replay_option(choices))
        return Scores(decided.logp, entropy=decided.entropy)

    def shard_blocks(self) -> Sequence[nn.Module]:
        return list(self.policy.children())

    def evaluate(self, rows: Tensor) -> Mapping[str, Tensor]:
        """Greedy choices on held-out questions under every budget; latency is estimated, not measured."""
        batches = [self._evaluate_greedy(batch) for batch in rows.split(self.eval_rows)]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def _evaluate_greedy(self, rows: Tensor) -> dict[str, Tensor]:
        decided = self.controller.decide(self.held_out, rows, greedy_option)
        questions, choices = self.held_out.question_of(rows), decided.choices
        medians, _ = self.held_out.estimates(rows)
        return {
            ACCURACY: self.grade(questions, self.answer(questions, choices, decided.prefix)).per_rollout[ACCURACY],
            "over_budget": self.held_out.over_budget(rows, choices).double(),
            "estimated_ms": value_of_choices(medians, choices),
        }

    def summarize_evaluation(self, columns: Mapping[str, Tensor]) -> Mapping[str, float]:
        budgets = self.config.budget.budgets
        accuracy = columns[ACCURACY].view(-1, len(budgets))
        infeasible = torch.cat([self.training.infeasible, self.held_out.infeasible])
        return {
            "accuracy_greedy": accuracy.nanmean().item(),
            **{
                f"accuracy_at_{budget.label}": accuracy[:, index].nanmean().item()
                for index, budget in enumerate(budgets)
            },
            "estimated_over_budget_fraction": columns["over_budget"].mean().item(),
            "estimated_ms": columns["estimated_ms"].mean().item(),
            "infeasible_fraction": infeasible.double().mean().item(),
        }

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """What `AdaptiveModel` needs besides the weights."""
        if self.task.source is None:
            return {}
        settings = settings_from_task(
            self.task,
            self.training,
            self.controller.hidden_states.width,
            sees_overview=self.config.stage1.sees_overview,
        )
        return settings_to_files(settings)

    def answer(
        self, questions: Sequence[Question], choices: Int64[Tensor, "rows 4"], prefix: PrefixStates | None = None
    ) -> list[str]:
        """The model's answers under the chosen knobs, in one batch."""
        settings = choices_to_knobs(self.options, choices)
        requests = [AnswerRequest(question.sample, knobs) for question, knobs in zip(questions, settings, strict=True)]
        return self.task.answer(requests, prefix)

    def grade(self, questions: Sequence[Question], answers: Sequence[str]) -> RewardTerms:
        """Accuracy and any further reward of each answer; missing where a function failed."""
        return grade_answers(self._functions, questions, answers)

    def latency_terms(
        self, budget_ratio: Float[Tensor, "*rows"], compute_cost: Float[Tensor, "*rows"]
    ) -> dict[str, Tensor]:
        """All terms but accuracy. With hard enforcement latency has no price, only the configuration's compute."""
        penalties = {} if self.config.budget.is_hard else penalty_terms(budget_ratio)
        return {**penalties, "compute_cost": compute_cost}
