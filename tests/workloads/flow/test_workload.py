"""A flow model as a workload: the laws hold for it, members share their start, only the window is kept."""

import json
from dataclasses import replace

import pytest
import torch
from allocator import peak_allocated
from processes import TESTS
from torch.testing import assert_close

import groupwise as gw
from groupwise.core.advantage import compute_advantages
from groupwise.core.io.files import read_jsonl
from groupwise.core.placement import RolloutRows
from groupwise.core.reward import weigh
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig, window_at
from workloads.flow.small import CPU, SmallConfig, recipe, residual_chi2

GOLDEN = TESTS / "golden" / "flow.json"


def built(**sampling):
    window = sampling.pop("window", WindowConfig("sliding", 1.0))
    return SmallConfig(SamplingConfig(**{"num_inference_steps": 4, "window": window, **sampling})).build(CPU)


def rows_of(conditions, members, rows_per_pass=1000, step=0):
    condition = torch.arange(conditions).repeat_interleave(members)
    return RolloutRows(5, step, rows_per_pass, condition, torch.arange(members).repeat(conditions), condition)


def rolled(workload, *arguments, **more):
    with torch.no_grad():
        return workload.rollout(rows_of(*arguments, **more))


@pytest.mark.parametrize("latent_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stepper", ["flow_sde", "dance_sde", "cps", "cps_distance"])
def test_before_an_update_the_ratio_is_exactly_one(latent_dtype, stepper):
    workload = built(latent_dtype=latent_dtype, stepper=stepper, eta=0.5, guidance_scale=2.0)
    rollouts = rolled(workload, 2, 3, step=1)
    scored = workload.score(rollouts)
    assert rollouts.data["window_latents"].dtype == getattr(torch, latent_dtype)
    assert torch.equal(scored.logp, rollouts.logp)
    assert scored.logp.requires_grad


def test_samples_have_standard_noise_and_only_the_window_is_stored():
    workload = built(num_inference_steps=6, window=WindowConfig("sliding", 1.0, size=2))
    rollouts = rolled(workload, 4, 4, step=2)
    latents = rollouts.data["window_latents"]
    assert rollouts.data["steps"].unique().tolist() == [2, 3]
    assert latents.shape == (16, 3, 3, 5, 8, 8)  # 3 of the 7 latents
    denoiser = workload.denoiser(6)
    velocity = workload.velocity(workload.conditioning, rollouts.data["condition"])
    for index, steps in enumerate(rollouts.data["steps"].unbind(1)):
        transition = denoiser.transition(latents[:, index], velocity, steps)
        assert residual_chi2(latents[:, index + 1], transition).mean().item() == pytest.approx(1.0, abs=0.03)


def test_members_share_one_start_that_is_computed_once(monkeypatch):
    workload = built(num_inference_steps=6, window=WindowConfig("sliding", 1.0, size=1))
    rows = []
    velocity = workload.model.velocity

    def counting(latents, sigma, conditioning):
        rows.append(len(latents))
        return velocity(latents, sigma, conditioning)

    monkeypatch.setattr(workload.model, "velocity", counting)
    rollouts = rolled(workload, 2, 4, step=3)
    starts = rollouts.data["window_latents"][:, 0].view(2, 4, -1)
    assert torch.equal(starts[:, 0], starts[:, 3])
    assert not torch.equal(starts[0, 0], starts[1, 0])
    ends = rollouts.data["latents"].view(2, 4, -1)
    assert not torch.equal(ends[:, 0], ends[:, 1])
    # 3 steps before the window and its first one for 2 groups; 2 after it for 8 members
    assert rows == [2] * 4 + [8] * 2
    rows.clear()
    workload.score(rollouts)
    assert rows == [2]
    alone = built(num_inference_steps=6, shared_noise=False, window=WindowConfig("sliding", 1.0, size=1))
    apart = rolled(alone, 2, 4, step=3).data["window_latents"][:, 0].view(2, 4, -1)
    assert not torch.equal(apart[:, 0], apart[:, 1])


def gradient_of(workload, rollouts, weights, rows_per_pass):
    """Of the weighted log-probs and of the KL."""
    workload.policy.zero_grad(set_to_none=True)
    for rows in workload.passes(rollouts, rows_per_pass):
        scored = workload.score(rollouts.select(rows))
        ((scored.logp * weights[rows, None]).sum() + 0.1 * scored.kl.sum()).backward()
    return [weight.grad.clone() for weight in workload.policy.parameters() if weight.grad is not None]


def test_what_members_share_has_the_gradient_of_each_alone():
    workload = SmallConfig(reference=True).build(CPU)
    rollouts = rolled(workload, 3, 4).select(torch.randperm(12, generator=torch.Generator().manual_seed(3)))
    with torch.no_grad():
        workload.policy.proj_out.bias.add_(0.05)  # away from the reference
    weights = torch.linspace(-1, 1.5, 12)
    together, alone = (gradient_of(workload, rollouts, weights, rows) for rows in (12, 1))
    assert len(together) == len(alone) > 10
    for ours, theirs in zip(together, alone, strict=True):
        assert_close(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


def test_the_update_holds_the_graph_of_one_step():
    """Nine steps take hardly more memory than two, where one graph of all takes several times as much."""
    peaks = {}
    for steps in (3, 10):
        workload = built(num_inference_steps=steps, window=WindowConfig("all"))
        rollouts = rolled(workload, 2, 4)

        def by_step(workload=workload, rollouts=rollouts):
            for score in workload.score_parts(rollouts):
                score().logp.sum().backward()

        peaks[steps] = peak_allocated(by_step)
        peaks[f"{steps} at once"] = peak_allocated(lambda w=workload, r=rollouts: w.score(r).logp.sum().backward())
    assert peaks[10] < 1.2 * peaks[3]
    assert peaks["10 at once"] > 4 * peaks[10]


def test_members_of_a_group_are_scored_together_wherever_they_were_sampled():
    workload = built()
    rollouts = rolled(workload, 3, 4).select(torch.tensor([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]))
    groups = [rollouts.data["group"][rows].tolist() for rows in workload.passes(rollouts, 4)]
    assert groups == [[0] * 4, [1] * 4, [2] * 4]


def test_rows_per_pass_and_neighbors_do_not_change_the_result():
    workload = built(window=WindowConfig("all"))
    whole, split = rolled(workload, 3, 4), rolled(workload, 3, 4, rows_per_pass=2)
    assert_close(whole.data["latents"], split.data["latents"], rtol=0, atol=1e-5)
    assert_close(whole.logp, split.logp, rtol=0, atol=1e-5)
    alone = RolloutRows(5, 0, 1, *(torch.tensor([number]) for number in (2, 3, 2)))
    with torch.no_grad():
        single = workload.rollout(alone)
    assert_close(single.data["latents"][0], whole.data["latents"][11], rtol=0, atol=1e-5)
    some = torch.tensor([7, 2])
    assert_close(workload.score(whole.select(some)).logp, whole.logp[some], rtol=0, atol=1e-5)


def test_guidance_is_part_of_sampling_and_of_scoring():
    plain, guided = built(), built(guidance_scale=3.0)
    first, second = rolled(plain, 1, 2), rolled(guided, 1, 2)
    assert not torch.allclose(first.data["latents"], second.data["latents"])
    assert not torch.allclose(plain.score(second).logp, second.logp)
    # by hand: negative + 3 (positive - negative)
    latents, sigma = first.data["latents"], torch.full((2,), 0.5)
    conditioning = guided.conditioning.of(torch.zeros(2, dtype=torch.int64), CPU)
    inputs = {name: conditioning[name] for name in ("text", "source", "camera")}
    positive = guided.model.velocity(latents, sigma, inputs)
    negative = guided.model.velocity(latents, sigma, {**inputs, "text": conditioning["negative_text"]})
    velocity = guided.velocity(guided.conditioning, torch.zeros(2, dtype=torch.int64))
    assert_close(velocity(latents, sigma), negative + 3 * (positive - negative), rtol=0, atol=1e-5)


def test_conditions_are_encoded_once():
    workload = built()
    workload.score(rolled(workload, 4, 4, rows_per_pass=3))
    rolled(workload, 4, 4, step=1)
    assert workload.conditioning.num_encoded == 4
    small_cache = SmallConfig(cached_conditions=2).build(CPU)
    rolled(small_cache, 4, 2)
    assert small_cache.conditioning.num_encoded > 4


def test_the_reference_is_the_initial_policy_and_the_kl_to_it_has_a_gradient():
    workload = SmallConfig(reference=True).build(CPU)
    rollouts = rolled(workload, 2, 2)
    assert workload.score(rollouts).kl.abs().max() == 0
    with torch.no_grad():
        workload.policy.proj_out.bias.add_(0.1)
    scored = workload.score(rollouts)
    assert (scored.kl > 0).all()
    scored.kl.sum().backward()
    assert workload.policy.proj_out.bias.grad.abs().min() > 0
    with workload.model.reference():
        assert torch.equal(workload.score(rollouts).logp, rollouts.logp)
    assert not torch.equal(workload.score(rollouts).logp, rollouts.logp)


def test_the_gradient_of_the_surrogate_is_that_of_the_log_probability():
    """A member pushed up becomes likelier, and more so than the other members."""
    workload = built()
    rollouts = rolled(workload, 1, 4)
    workload.score(rollouts).logp[2].sum().backward()
    with torch.no_grad():
        for weight in workload.policy.parameters():
            weight.add_(1e-3 * weight.grad / 1.0)
    change = (workload.score(rollouts).logp - rollouts.logp).sum(1)
    assert change[2] > 0
    assert change.argmax() == 2


def test_steps_with_rewards_per_step_have_advantages_per_step():
    workload = SmallConfig(step_rewards=True).build(CPU)
    rollouts = rolled(workload, 2, 4)
    terms = workload.rewards(rollouts)
    assert terms.per_decision["predicted warmth"].shape == rollouts.logp.shape
    rewards = weigh(terms, gw.RewardConfig(weights={"steadiness": 0.0}))
    advantages = compute_advantages(rewards, rollouts.group_ids)
    assert advantages.values.shape == rollouts.logp.shape
    assert_close(advantages.values.view(2, 4, -1).mean(1), torch.zeros(2, 2, dtype=torch.float64), rtol=0, atol=1e-9)
    by_hand = terms.per_rollout["warmth"] + terms.per_decision["predicted warmth"][:, 1]
    group = by_hand[:4]
    assert_close(advantages.values[:4, 1], (group - group.mean()) / (group.std(correction=0) + 1e-6))


def run_of(folder, config, **run):
    gw.train(replace(config, run=replace(config.run, run_dir=folder, **run)))
    return [entry["reward"] for entry in read_jsonl(folder / "metrics.jsonl")]


def test_it_trains_along_the_golden_curve_and_logs_samples(tmp_path):
    rewards = run_of(tmp_path, replace(recipe(), steps=6))
    assert rewards == pytest.approx(json.loads(GOLDEN.read_text()), abs=2e-3)
    before, after = (json.loads((tmp_path / "eval.json").read_text())[moment] for moment in ("before", "after"))
    assert after["held-out reward"] > before["held-out reward"] + 0.02
    (sample, *_) = read_jsonl(tmp_path / "samples.jsonl")
    assert set(sample) >= {"prompt", "name", "trained_steps", "reward", "advantage"}


def test_a_resumed_run_is_bit_identical(tmp_path):
    for name, steps in (("straight", (4,)), ("stopped", (2, 4))):
        for last in steps:
            run_of(tmp_path / name, replace(recipe(), steps=last), resume=True, preflight=False)
    for file in ("policy.safetensors", "ema.safetensors", "optimizer.safetensors"):
        straight, stopped = (
            (tmp_path / name / "checkpoints" / "step-000004" / file).read_bytes() for name in ("straight", "stopped")
        )
        assert straight == stopped


def test_step_rewards_train_too(tmp_path):
    config = replace(recipe(), workload=SmallConfig(step_rewards=True, reference=True), steps=2)
    run_of(tmp_path, config)
    (entry, *_) = read_jsonl(tmp_path / "metrics.jsonl")
    assert "reward/predicted warmth" in entry
    (sample, *_) = read_jsonl(tmp_path / "samples.jsonl")
    assert len(sample["advantage"]) == len(window_at(config.workload.sampling, 0))
