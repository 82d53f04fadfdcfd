"""Checks before the first update. Most bugs in GRPO train quietly and learn less; these make them loud."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from groupwise.core.errors import OutOfMemoryError, UserError
from groupwise.core.groups import group_id
from groupwise.core.loss import kl_to_reference
from groupwise.core.placement import Placement, place
from groupwise.core.reward import weigh
from groupwise.core.shape import StepShape
from groupwise.core.types import Rollouts, Scores
from groupwise.dist.comm import Comm
from groupwise.memory.recovery import Retry, no_retry
from groupwise.training.config import Config
from groupwise.training.loop import compute_rewards, gather_group_ids, generate_rollouts
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.base import Workload

RATIO_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference between sampled and recomputed log-probability, by the dtype of the log-probabilities."""


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def preflight(
    workload: Workload, *, state: State, shape: StepShape, config: Config, comm: Comm, again: Retry = no_retry
) -> list[Check]:
    """Try one pass of the coming step and look at it from all sides. Nothing of the run is changed."""
    buffers = {name: buffer.clone() for name, buffer in state.policy.named_buffers()}
    placed = place(shape, seed=config.seed, step=state.step, rounds=1 + config.refill)
    checks = [_shapes_divide(shape), _parameters_agree(state, comm)]
    checks += [Check("note", True, note) for note in workload.reporter.preflight_notes()]
    rollouts = again("rollout", generate_rollouts, workload, placed, comm, state.cut)
    checks.append(_as_check("members share their condition", lambda: _check_group_ids(rollouts, placed, comm)))

    seen = partial(_check_rewards, workload, rollouts, state, config, comm)
    checks.append(again("reward", _as_check, "rewards arrive", seen))
    checks += again("update", _score_checks, workload, rollouts, state, config, comm)
    state.optimizer.zero_grad(set_to_none=True)
    for name, buffer in state.policy.named_buffers():
        buffer.copy_(buffers[name])
    return checks


def _score_checks(workload: Workload, rollouts: Rollouts, state: State, config: Config, comm: Comm) -> list[Check]:
    """What can be seen from one scored pass."""
    state.optimizer.zero_grad(set_to_none=True)
    part = rollouts.select(torch.arange(min(len(rollouts), state.cut.rows_per_pass)))
    with comm.fail_together(f"score() of {type(workload).__name__}"):
        scored = workload.score(part)
    checks = [_ratio_is_one(scored, part, comm)]
    if scored.logp.shape == part.logp.shape:
        checks.append(_gradients_arrive(scored, part, state, comm))
    if config.loss.kl and scored.logp.shape == part.logp.shape:
        checks.append(_kl_has_gradient(scored, part, comm))
    if config.loss.entropy:
        given = scored.entropy is not None
        checks.append(
            Check("entropy is given", given, "" if given else "score() gives none, but loss.entropy is above 0.")
        )
    return checks


def refuse_failures(checks: list[Check]) -> None:
    """Stop before anything is trained if a check failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        raise UserError("Preflight failed. " + " ".join(failed) + " (--no-preflight trains regardless.)")


def _shapes_divide(shape: StepShape) -> Check:
    """A shape that does not divide cannot be made, so this one only says what was found."""
    return Check(
        "shapes divide",
        True,
        shape.summary(),
    )


def _parameters_agree(state: State, comm: Comm) -> Check:
    """Trainable weights are compared bit by bit; frozen ones and buffers by two sums, which is quick."""
    trainable = [weight.data for weight in trainable_weights(state.policy).values()]
    others = (*state.policy.parameters(), *state.policy.buffers())
    with comm.fail_together("Comparing the weights"):
        sums = torch.stack([torch.stack(_two_sums(tensor.detach())) for tensor in others])
        fingerprint = group_id(0, *trainable, sums)
    everyone = comm.gather(torch.tensor([fingerprint]))
    strangers = (everyone != everyone[0]).nonzero().flatten().tolist()
    if strangers:
        detail = f"ranks {strangers} hold other weights than rank 0. Make the policy from one seed or file on all."
        return Check("parameters are equal on all ranks", False, detail)
    count = sum(weight.numel() for weight in trainable_weights(state.policy).values())
    return Check("parameters are equal on all ranks", True, f"{count:,} trainable numbers, {comm.ranks} ranks")


def _two_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """One tensor at a time, and no wider copy of it."""
    return tensor.sum(dtype=torch.float32).cpu(), tensor.abs().sum(dtype=torch.float32).cpu()


def _as_check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except OutOfMemoryError:
        raise
    except UserError as error:
        return Check(name, False, str(error))


def _check_group_ids(rollouts: Rollouts, placed: Placement, comm: Comm) -> str:
    gather_group_ids(rollouts, placed, comm)
    return f"{placed.shape.conditions_per_step} groups of {placed.shape.group_size}, found by id"


def _check_rewards(workload: Workload, rollouts: Rollouts, state: State, config: Config, comm: Comm) -> str:
    rewards = weigh(compute_rewards(workload, rollouts, comm, state.cut), config.reward)
    present = rewards.total[~rewards.total.isnan()].tolist()
    span = f"{min(present):.3g} to {max(present):.3g}" if present else "none"
    return f"{', '.join(rewards.terms.per_rollout)}: {span}, {rewards.missing} missing"


def _ratio_is_one(scored: Scores, part: Rollouts, comm: Comm) -> Check:
    name = "ratio is 1 before the first update"
    if scored.logp.shape != part.logp.shape:
        detail = (
            f"score() gives logp of shape {tuple(scored.logp.shape)} where rollout() gave {tuple(part.logp.shape)}."
        )
        return Check(name, False, detail)
    gap = torch.where(part.mask, scored.logp.detach() - part.logp, torch.zeros_like(part.logp)).abs().max().item()
    gap = comm.max(float("inf") if math.isnan(gap) else gap)[0]
    allowed = RATIO_TOLERANCE[part.logp.dtype]
    if math.isinf(gap):
        return Check(name, False, "score() gives log-probabilities that are not finite for decisions that were taken.")
    if gap > allowed:
        detail = (
            f"recomputed log-probabilities differ from the sampled ones by up to {gap:.2g} (allowed {allowed:g}). Score"
            " with the same temperature, masks and dtype as in the rollout, and switch dropout off."
        )
        return Check(name, False, detail)
    return Check(name, True, f"largest difference {gap:.1g}")


def _gradients_arrive(scored: Scores, part: Rollouts, state: State, comm: Comm) -> Check:
    """An uneven mix of log-probabilities must reach every part of the policy that is to be trained."""
    state.optimizer.zero_grad(set_to_none=True)
    with comm.fail_together("The backward pass of preflight"):
        if scored.logp.requires_grad:
            mix = torch.linspace(1, 2, part.logp.numel()).view_as(part.logp).to(part.logp)
            torch.where(part.mask, mix * scored.logp, torch.zeros_like(mix)).sum().backward(retain_graph=True)
    idle = sorted(set.intersection(*comm.gather_objects([set(_without_gradient(state))])))
    if idle:
        detail = (
            f"no gradient reaches {', '.join(idle[:5])}{' ...' if len(idle) > 5 else ''}. Look for a detach, a no_grad"
            " or a head that score() leaves out; freeze what is not meant to be trained."
        )
        return Check("every trainable part gets a gradient", False, detail)
    return Check("every trainable part gets a gradient", True, f"{len(trainable_weights(state.policy))} tensors")


def _without_gradient(state: State) -> Iterator[str]:
    """Tensors that are not connected at all, and children of the policy whose gradient is zero throughout.

    A single tensor may rightly be zero (the A matrix of a fresh LoRA adapter, whose B is still zero).
    """
    moved: dict[str, bool] = {}
    for name, weight in trainable_weights(state.policy).items():
        if weight.grad is None:
            yield name
            continue
        child = name.split(".")[0]
        moved[child] = moved.get(child, False) or bool(weight.grad.any())
    yield from (child for child, has_moved in moved.items() if not has_moved)


def _kl_has_gradient(scored: Scores, part: Rollouts, comm: Comm) -> Check:
    """k3 is flat where both policies agree, as they may at the start: a shifted reference must pull."""
    name = "KL has a gradient"
    if scored.kl is not None:  # flat where both policies agree, so only its connection can be seen
        connected = comm.any(scored.kl.requires_grad)
        detail = "in closed form" if connected else "it has none: look for no_grad and detach in score()."
        return Check(name, connected, detail)
    if scored.reference_logp is None:
        return Check(name, False, "loss.kl is above 0, but score() gives no reference_logp. Give one, or set it to 0.")
    pull = torch.zeros(1)
    if scored.logp.requires_grad:
        kl = kl_to_reference(scored.logp, scored.reference_logp + 0.5, part.mask, denominator=1.0)
        (pull,) = torch.autograd.grad(kl, scored.logp, retain_graph=True)
    arrives = comm.any(bool(pull.isfinite().all() and pull.any()))
    detail = f"reference given for {part.mask.sum()} decisions"
    return Check(
        name, arrives, detail if arrives else "it is zero or not finite: look at reference_logp, and for no_grad."
    )
