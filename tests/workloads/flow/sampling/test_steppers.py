"""Denoising steps: by hand, against an exact velocity, and against torch's own distributions."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from groupwise.workloads.flow.sampling.steppers import (
    STEPPERS,
    NoiseInterval,
    Transition,
    cps,
    cps_distance,
    dance_sde,
    flow_sde,
    ode,
    sample_transition,
    transition_kl,
    transition_logprob,
)
from workloads.flow.small import residual_chi2

ETA = {"ode": 0.0, "flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}
NOISY = ("flow_sde", "dance_sde", "cps")


def interval(sigma, sigma_next, eta, rows=1, after_first=0.9):
    levels = torch.ones(rows, dtype=torch.float64)
    return NoiseInterval(sigma * levels, sigma_next * levels, eta, after_first)


def one(number):
    return torch.tensor([[number]], dtype=torch.float64)


def test_numbers_by_hand():
    # sigma .5 -> .4, x 1, velocity 2
    assert ode(one(1.0), one(2.0), interval(0.5, 0.4, 0.0)).mean.item() == pytest.approx(0.8)
    # s = .7 sqrt(.5/.5) = .7: mean = 1 (1 - .49 .1 / 1) + 2 (1 + .49 .5 / 1) (-.1) = .951 - .249
    flow = flow_sde(one(1.0), one(2.0), interval(0.5, 0.4, 0.7))
    assert flow.mean.item() == pytest.approx(0.702)
    assert flow.std.item() == pytest.approx(0.7 * math.sqrt(0.1))
    # s = .3: mean = 1 (1 - .09 .1) + 2 (1 + .09 .5) (-.1) = .991 - .209
    dance = dance_sde(one(1.0), one(2.0), interval(0.5, 0.4, 0.3))
    assert dance.mean.item() == pytest.approx(0.782)
    assert dance.std.item() == pytest.approx(0.3 * math.sqrt(0.1))
    # clean = 1 - .5 2 = 0, noise = 1 + .5 2 = 2; eta 1/3: mean = .6 0 + .4 cos(30 deg) 2, std = .4 sin(30 deg)
    kept = cps(one(1.0), one(2.0), interval(0.5, 0.4, 1 / 3))
    assert kept.mean.item() == pytest.approx(0.8 * math.cos(math.pi / 6))
    assert kept.std.item() == pytest.approx(0.2)


def test_at_full_noise_the_second_level_stands_in_the_denominator():
    first = flow_sde(one(1.0), one(0.0), interval(1.0, 0.9, 0.7, after_first=0.9))
    assert first.std.item() == pytest.approx(0.7 * math.sqrt(1 / 0.1) * math.sqrt(0.1))


def exact_velocity(x, sigma):
    """Of data N(2, 0.5^2): the mean of noise - clean, given x."""
    centered = (x - 2 * (1 - sigma)) / (0.25 * (1 - sigma) ** 2 + sigma**2)
    return sigma * centered - (2 + 0.25 * (1 - sigma) * centered)


@pytest.mark.parametrize(("name", "std"), [("ode", 0.493), ("flow_sde", 0.499), ("dance_sde", 0.494), ("cps", 0.395)])
def test_the_marginal_with_an_exact_velocity(name, std):
    """100 steps, the last one deterministic. CPS does not keep the spread; the others do, to their step size."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(40_000, 1, dtype=torch.float64, generator=source)
    for index in range(100):
        stepper = STEPPERS[name] if index < 99 else ode
        step = interval(1 - index / 100, 1 - (index + 1) / 100, ETA[name], rows=len(x), after_first=0.99)
        transition = stepper(x, exact_velocity(x, 1 - index / 100), step)
        x = sample_transition(transition, torch.randn(x.shape, dtype=torch.float64, generator=source))
    assert x.mean().item() == pytest.approx(2.0, abs=0.012)
    assert x.std().item() == pytest.approx(std, abs=0.006)


@pytest.mark.parametrize("name", NOISY)
def test_residuals_of_samples_are_standard_and_of_an_ode_path_are_not(name):
    source = torch.Generator().manual_seed(2)
    x, velocity, noise = (torch.randn(4, 30_000, generator=source) for _ in range(3))
    levels = torch.full((4,), 0.6)
    step = NoiseInterval(levels, levels - 0.1, ETA[name], 0.9)
    transition = STEPPERS[name](x, velocity, step)
    assert residual_chi2(sample_transition(transition, noise), transition) == pytest.approx(torch.ones(4), abs=0.03)
    # the same path without noise, scored as if it had been sampled: the residuals are far too small
    assert (residual_chi2(ode(x, velocity, step).mean, transition) < 0.8).all()


@given(st.floats(0.05, 0.95), st.floats(0.1, 0.9), st.sampled_from(NOISY), st.integers(0, 100))
def test_log_probabilities_and_divergence_are_those_of_gaussians(sigma, share, name, seed):
    source = torch.Generator().manual_seed(seed)
    x, velocity, other, noise = (torch.randn(3, 5, dtype=torch.float64, generator=source) for _ in range(4))
    step = interval(sigma, sigma * share, ETA[name], rows=3)
    transition, reference = (STEPPERS[name](x, v, step) for v in (velocity, other))
    following = sample_transition(transition, noise)
    ours, theirs = (Normal(each.mean, each.std[:, None].expand(3, 5)) for each in (transition, reference))
    assert_close(transition_logprob(following, transition), ours.log_prob(following).mean(1))
    assert_close(transition_kl(transition, reference), kl_divergence(ours, theirs).mean(1))


def test_divergence_by_hand_holds_dt_and_has_a_gradient():
    # |mean - its mean|^2 = .01; s = .7, |dt| = .1: .01 / (2 .49 .1)
    mean = torch.full((1, 4), 0.1, requires_grad=True)
    std = torch.tensor([0.7 * math.sqrt(0.1)])
    kl = transition_kl(Transition(mean, std), Transition(torch.zeros(1, 4), std))
    assert kl.item() == pytest.approx(0.01 / (2 * 0.49 * 0.1))
    kl.sum().backward()
    assert_close(mean.grad, torch.full((1, 4), 0.1 / (0.49 * 0.1) / 4))


def test_no_gradient_flows_through_the_sample():
    mean = torch.zeros(1, 3, requires_grad=True)
    transition = Transition(mean, torch.ones(1))
    transition_logprob(mean + 1.0, transition).sum().backward()
    assert_close(mean.grad, torch.full((1, 3), 1 / 3))


FOLDER = Path(__file__).parent.parent / "reference"
REFERENCE = json.loads((FOLDER / "flow_grpo_steps.json").read_text())
OTHERS = json.loads((FOLDER / "dance_mix_kl.json").read_text())
DANCE, MIX, KL = (OTHERS[name] for name in ("dancegrpo", "mixgrpo", "flow_grpo_kl"))


def tensor_of(entry):
    return torch.tensor(entry["data"]).view(entry["shape"])


def levels_of(sigma):
    return torch.full((2,), sigma)


def step_of(stepper, eta, sigma, sigma_next):
    """From the inputs that DanceGRPO and MixGRPO were given, on their schedule."""
    interval = NoiseInterval(levels_of(sigma), levels_of(sigma_next), eta, DANCE["sigmas"][1])
    return stepper(tensor_of(DANCE["sample"]), tensor_of(DANCE["velocity"]), interval)


@pytest.mark.parametrize("index", range(len(DANCE["steps"])))
def test_steps_are_those_of_dancegrpo(index):
    step = DANCE["steps"][index]
    transition = step_of(dance_sde, step["eta"], step["sigma"], step["sigma_next"])
    assert_close(transition.mean, tensor_of(step["mean"]), rtol=0, atol=1e-6)
    assert_close(transition.std, levels_of(step["std"]), rtol=1e-6, atol=0)
    logp = transition_logprob(tensor_of(step["prev_sample"]), transition)
    assert_close(logp, tensor_of(step["log_prob"]), rtol=0, atol=2e-6)


def test_steps_are_those_of_mixgrpo():
    """Its dance step leaves out the two constants of the density, which no ratio sees; DanceGRPO's own has them."""
    sigma, sigma_next = DANCE["sigmas"][MIX["index"] :][:2]
    sample, expected = tensor_of(MIX["prev_sample"]), MIX["flow_grpo_step"]
    transition = step_of(flow_sde, expected["eta"], sigma, sigma_next)
    assert_close(transition.mean, tensor_of(expected["mean"]), rtol=0, atol=1e-6)
    assert_close(transition.std, levels_of(expected["std"]), rtol=1e-6, atol=0)
    assert_close(transition_logprob(sample, transition), tensor_of(expected["log_prob"]), rtol=0, atol=2e-6)
    expected = MIX["dance_grpo_step"]
    transition = step_of(dance_sde, expected["eta"], sigma, sigma_next)
    logp = transition_logprob(sample, transition)
    assert_close(logp, tensor_of(expected["log_prob_of_dancegrpo"]), rtol=0, atol=5e-6)
    constants = transition.std.log() + math.log(2 * math.pi) / 2
    assert_close(logp + constants, tensor_of(expected["log_prob"]), rtol=0, atol=5e-6)


def test_the_divergence_is_that_of_flow_grpo_for_wan():
    """Its newer one for SD3 leaves |dt| out of the variance."""
    mean, reference = tensor_of(KL["mean"]), tensor_of(KL["ref_mean"])
    noise_scale, root = torch.tensor(KL["noise_scale"]), KL["sqrt_minus_dt"]
    for std, expected in ((noise_scale * root, KL["wan_kl"]), (noise_scale, KL["sd3_kl"])):
        kl = transition_kl(Transition(mean, std), Transition(reference, std))
        assert kl.mean().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("index", range(len(REFERENCE["steps"])))
def test_steps_are_those_of_flow_grpo(index):
    """Means, scores and gradients that flow_grpo's own code gave. Its cps scores by the distance."""
    step = REFERENCE["steps"][index]
    stepper = STEPPERS[{"sde": "flow_sde", "cps": "cps_distance"}[step["sde_type"]]]
    x, velocity = tensor_of(REFERENCE["sample"]), tensor_of(REFERENCE["velocity"]).requires_grad_()
    second = REFERENCE["sigmas"]["data"][1]
    levels = (torch.tensor(step["sigma"]), torch.tensor(step["sigma_next"]))
    transition = stepper(x, velocity, NoiseInterval(*levels, step["noise_level"], second))
    assert_close(transition.mean, tensor_of(step["mean"]), rtol=0, atol=2e-6)
    logp = transition_logprob(tensor_of(step["prev_sample"]), transition)
    assert_close(logp, tensor_of(step["log_prob"]), rtol=1e-4, atol=2e-6)
    logp.sum().backward()
    assert_close(velocity.grad, tensor_of(step["grad_of_sum_logprob_wrt_velocity"]), rtol=1e-3, atol=1e-5)


def test_the_distance_is_the_log_prob_without_std_and_constants():
    x, velocity, step = one(1.0), one(2.0), interval(0.5, 0.4, 0.8)
    gaussian, distance = cps(x, velocity, step), cps_distance(x, velocity, step)
    assert (gaussian.mean, gaussian.std) == (distance.mean, distance.std)
    sample = gaussian.mean + 0.3
    assert transition_logprob(sample, distance).item() == pytest.approx(-0.09)
    constants = gaussian.std.log() + math.log(2 * math.pi) / 2
    expected = -0.09 / (2 * gaussian.std**2) - constants
    assert_close(transition_logprob(sample, gaussian), expected)


def test_a_schedule_that_begins_almost_at_noise_begins_at_noise():
    """At 0.999999 the noise scale would be 0.7 sqrt(0.999999 / 1e-6) = 700."""
    at_one, almost = (flow_sde(one(0.5), one(1.0), interval(level, 0.9, 0.7)) for level in (1.0, 0.999999))
    assert_close(almost.std, at_one.std, rtol=1e-4, atol=0)
    assert_close(almost.mean, at_one.mean, rtol=1e-4, atol=0)
