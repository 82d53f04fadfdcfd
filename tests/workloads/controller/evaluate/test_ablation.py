"""One input of the controller is replaced, the others stay."""

import pytest
import torch
from tiny.controller import SmallConfig

from groupwise.workloads.controller.config import BudgetConfig, StageOneConfig
from groupwise.workloads.controller.evaluate.ablation import (
    SwappedStates,
    ablated_controllers,
    partners_of_other_pictures,
)
from groupwise.workloads.controller.evaluate.baselines import controller_choices
from groupwise.workloads.controller.evaluate.exact import build_evaluation_set

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workload():
    return SmallConfig(budget=BudgetConfig(values=(0.7, 0.9))).build(CPU)


@pytest.fixture(scope="module")
def test_set(workload):
    return build_evaluation_set(workload, workload.task.test_questions())


def inputs(states, questions):
    tiers = positions = torch.zeros(len(questions), dtype=torch.int64)
    tokens, _ = states.latency_tokens(questions, tiers, positions)
    return {
        "question": states.question_embeddings(questions),
        "overview": states.overviews(questions),
        "latency_token": tokens,
    }


@pytest.mark.parametrize("replaced", ["question", "overview", "latency_token"])
def test_one_input_is_the_partners_or_zeros_and_the_others_are_its_own(workload, test_set, replaced):
    states, questions = workload.controller.hidden_states, test_set.questions
    partners = partners_of_other_pictures(test_set)
    own = inputs(states, questions)
    others = inputs(states, [partners[question.sample.name] for question in questions])
    swapped = inputs(SwappedStates(states, replaced, partners), questions)
    zeros = inputs(SwappedStates(states, replaced, None), questions)
    for name in own:
        assert torch.equal(swapped[name], (others if name == replaced else own)[name])
        assert torch.equal(zeros[name], torch.zeros_like(own[name]) if name == replaced else own[name])


def test_partners_are_of_another_picture_and_every_picture_serves_once(test_set):
    partners = partners_of_other_pictures(test_set)
    pictures = {question.sample.name: question.image for question in test_set.questions}
    assert all(partners[name].image != picture for name, picture in pictures.items())
    assert sorted(partner.image for partner in partners.values()) == sorted(pictures.values())
    assert partners_of_other_pictures(test_set.first(1)) == {}


def test_the_network_is_the_trained_one_and_what_it_never_sees_is_not_replaced(workload, test_set):
    ablated = ablated_controllers(workload.controller, test_set)
    assert all(controller.policy is workload.policy for controller in ablated.values())
    unseen = SwappedStates(workload.controller.hidden_states, "nothing", None)
    own = controller_choices(workload.controller, test_set)
    ablated["overview_zeros"].hidden_states = unseen
    assert torch.equal(controller_choices(ablated["overview_zeros"], test_set), own)
    blind = SmallConfig(budget=BudgetConfig(values=(0.7,)), stage1=StageOneConfig("question")).build(CPU)
    names = ablated_controllers(blind.controller, test_set).keys()
    assert names == {f"{name}_{by}" for name in ("question", "latency_token") for by in ("swapped", "zeros")}
