"""Checks before the first update. Most bugs in GRPO do not crash, they only learn less; these checks find them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from groupwise.core.errors import OutOfMemoryError, UserError
from groupwise.core.groups import group_id
from groupwise.core.loss import kl_to_reference
from groupwise.core.placement import Placement, place
from groupwise.core.reward import weigh
from groupwise.core.shape import StepShape
from groupwise.core.types import Rollouts, Scores, concatenate_scores
from groupwise.dist.comm import Comm
from groupwise.dist.sharding import call_block, full, is_sharded, passes_in_step
from groupwise.training.nonfinite import refuse_nonfinite_logp
from groupwise.training.rollout import compute_rewards, gather_group_ids, generate_rollouts
from groupwise.training.setup import Setup
from groupwise.training.state import State, trainable_weights
from groupwise.workloads.base import Workload

RATIO_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 1e-2}
"""Largest difference between sampled and recomputed log-probability, by the dtype of the log-probabilities or of the
policy's products, whichever allows more."""


NOTE = "note"
"""The name of what is no check: information from the workload, shown with the checks."""


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


def preflight(setup: Setup) -> list[Check]:
    """Check rollouts, groups, rewards, ratios and gradients on one pass of the next step. The run's state stays."""
    config, comm, state, retry = setup.config, setup.comm, setup.state, setup.recovery.retry_smaller
    buffers = {name: buffer.clone() for name, buffer in state.policy.named_buffers()}
    placement = place(setup.shape, seed=config.seed, step=state.step, rounds=1 + config.refill)
    checks = [_shape_fits(setup.shape), _parameters_agree(state, comm), *_tied_weights_are_one(state.policy)]
    checks += [Check(NOTE, True, note) for note in setup.workload.reporter.preflight_notes()]
    rollouts = retry("rollout", generate_rollouts, setup, placement)
    refuse_nonfinite_logp(rollouts, state.step, comm)
    checks.append(_as_check("members share their condition", partial(_check_group_ids, rollouts, placement, comm)))
    checks.append(retry("reward", _as_check, "rewards arrive", partial(_check_rewards, setup, rollouts)))
    checks += retry("update", _score_checks, setup, rollouts)
    state.optimizer.zero_grad(set_to_none=True)
    for name, buffer in state.policy.named_buffers():
        buffer.copy_(buffers[name])
    return checks


def _score_checks(setup: Setup, rollouts: Rollouts) -> list[Check]:
    """What one scored pass shows."""
    loss, comm, state, workload = setup.config.loss, setup.comm, setup.state, setup.workload
    state.optimizer.zero_grad(set_to_none=True)
    part = rollouts.select(torch.arange(min(len(rollouts), state.row_limits["rows_per_pass"])))
    with comm.fail_together(f"score() of {type(workload).__name__}"), passes_in_step(state.policy):
        scores = _score_and_differentiate(workload, part)
    checks = [_ratio_is_one(scores, part, comm, workload.compute_dtype)]
    if scores.logp.shape == part.logp.shape:
        checks.append(_gradients_arrive(state, workload.idle_parts(part), comm))
        if loss.kl:
            checks.append(_kl_has_gradient(scores, part, comm))
    if loss.entropy:
        given = scores.entropy is not None
        detail = "" if given else "score() gives none, but loss.entropy is above 0."
        checks.append(Check("entropy is given", given, detail))
    return checks


def _score_and_differentiate(workload: Workload, rollouts: Rollouts) -> Scores:
    """Scores without graphs. The policy gets the gradient of an unevenly weighted sum of the log-probabilities."""
    weights = torch.linspace(1, 2, rollouts.logp.numel()).view_as(rollouts.logp).to(rollouts.logp)
    parts, done = [], 0
    for score in workload.score_parts(rollouts):
        columns = call_block(workload.policy, score).by_name()
        logp = columns["logp"]
        part = slice(done, done + logp.shape[1])
        done = part.stop
        mask = rollouts.mask[:, part]
        if logp.requires_grad and logp.shape == mask.shape:
            torch.where(mask, weights[:, part] * logp, torch.zeros_like(logp)).sum().backward()
        parts.append(Scores(**{name: c.detach().requires_grad_(c.requires_grad) for name, c in columns.items()}))
    return concatenate_scores(parts)


def refuse_failures(checks: list[Check]) -> None:
    """Stop before anything is trained if a check failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
    if failed:
        raise UserError("Preflight failed. " + " ".join(failed) + " (--no-preflight trains regardless.)")


def _shape_fits(shape: StepShape) -> Check:
    """A shape that does not fit cannot be made, so this check only shows the numbers."""
    return Check("shapes divide", True, shape.summary())


def _parameters_agree(state: State, comm: Comm) -> Check:
    """Trainable weights must be bit-identical; frozen ones and buffers are compared by two sums, which is fast."""
    if is_sharded(state.policy):  # `shard` has compared the whole weights
        return Check("parameters are equal on all ranks", True, f"sharded, {comm.ranks} ranks")
    trainable = [weight.data for weight in trainable_weights(state.policy).values()]
    others = (*state.policy.parameters(), *state.policy.buffers())
    with comm.fail_together("Comparing the weights"):
        sums = torch.stack([torch.stack(_two_sums(tensor.detach())) for tensor in others])
        fingerprint = group_id(0, *trainable, sums)
    fingerprints = comm.gather(torch.tensor([fingerprint]))
    differing = (fingerprints != fingerprints[0]).nonzero().flatten().tolist()
    if differing:
        detail = f"ranks {differing} hold other weights than rank 0. Make the policy from one seed or file on all."
        return Check("parameters are equal on all ranks", False, detail)
    count = sum(weight.numel() for weight in trainable_weights(state.policy).values())
    return Check("parameters are equal on all ranks", True, f"{count:,} trainable numbers, {comm.ranks} ranks")


def _tied_weights_are_one(policy: nn.Module) -> list[Check]:
    """For each language model that ties its head to its embedding: moving it to some devices makes two of them."""
    checks = []
    for module in policy.modules():
        config, get_head = getattr(module, "config", None), getattr(module, "get_output_embeddings", None)
        head = get_head() if getattr(config, "tie_word_embeddings", False) and get_head is not None else None
        if head is None:
            continue
        tied = head.weight is cast(Any, module).get_input_embeddings().weight
        detail = (
            f"head and embedding of {type(module).__name__} are one weight of {head.weight.numel():,} numbers"
            if tied
            else f"{type(module).__name__} ties its head to its embedding, and they are two weights now. Move it to its"
            " device with groupwise.dist.devices.move_module, or call tie_weights() after moving it."
        )
        checks.append(Check("tied weights are one", tied, detail))
    return checks


def _two_sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Of values and of absolute values, without a float32 copy of the tensor."""
    return tensor.sum(dtype=torch.float32).cpu(), tensor.abs().sum(dtype=torch.float32).cpu()


def _as_check(name: str, describe: Callable[[], str]) -> Check:
    """Passed with its description, or failed with the error it raises."""
    try:
        return Check(name, True, describe())
    except OutOfMemoryError:
        raise
    except UserError as error:
        return Check(name, False, str(error))


def _check_group_ids(rollouts: Rollouts, placement: Placement, comm: Comm) -> str:
    gather_group_ids(rollouts, placement, comm)
    return f"{placement.shape.conditions_per_step} groups of {placement.shape.group_size}, found by id"


def _check_rewards(setup: Setup, rollouts: Rollouts) -> str:
    rewards = weigh(compute_rewards(setup, rollouts), setup.config.reward)
    present = rewards.total[~rewards.total.isnan()].tolist()
    extent = f"{min(present):.3g} to {max(present):.3g}" if present else "none"
    return f"{', '.join(rewards.terms.per_rollout)}: {extent}, {rewards.missing} missing"


def _ratio_is_one(scores: Scores, part: Rollouts, comm: Comm, compute_dtype: str | None = None) -> Check:
    name = "ratio is 1 before the first update"
    if scores.logp.shape != part.logp.shape:
        detail = (
            f"score() gives logp of shape {tuple(scores.logp.shape)} where rollout() gave {tuple(part.logp.shape)}."
        )
        return Check(name, False, detail)
    largest = torch.where(part.mask, scores.logp.detach() - part.logp, torch.zeros_like(part.logp)).abs().max().item()
    largest = comm.max(float("inf") if math.isnan(largest) else largest)[0]
    dtypes = [part.logp.dtype, *([getattr(torch, compute_dtype)] if compute_dtype else [])]
    allowed = max(RATIO_TOLERANCE[dtype] for dtype in dtypes)
    if math.isinf(largest):
        return Check(name, False, "score() gives log-probabilities that are not finite for decisions that were taken.")
    if largest > allowed:
        detail = (
            f"recomputed log-probabilities differ from the sampled ones by up to {largest:.2g} (allowed {allowed:g})."
            " Score with the same temperature, masks and dtype as in the rollout, and switch dropout off."
        )
        return Check(name, False, detail)
    return Check(name, True, f"largest difference {largest:.1g}")


def _gradients_arrive(state: State, idle_parts: Sequence[str], comm: Comm) -> Check:
    """The log-probabilities must have a gradient in every trainable part of the policy that these rollouts use."""
    without = {name for name in _without_gradient(state) if name.split(".")[0] not in idle_parts}
    missing = sorted(set.intersection(*comm.gather_objects([without])))
    if missing:
        detail = (
            f"no gradient reaches {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Look for a detach, a"
            " no_grad or a head that score() leaves out; freeze what is not meant to be trained."
        )
        return Check("every trainable part gets a gradient", False, detail)
    unused = f"; these rollouts do not use {' and '.join(idle_parts)}" if idle_parts else ""
    return Check(
        "every trainable part gets a gradient", True, f"{len(trainable_weights(state.policy))} tensors{unused}"
    )


def _without_gradient(state: State) -> Iterator[str]:
    """Tensors that are not connected at all, and children of the policy whose gradient is zero throughout.

    A single tensor may rightly be zero (the A matrix of a fresh LoRA adapter, whose B is still zero).
    """
    has_gradient: dict[str, bool] = {}
    for name, weight in trainable_weights(state.policy).items():
        if weight.grad is None:
            yield name
            continue
        child = name.split(".")[0]
        has_gradient[child] = has_gradient.get(child, False) or bool(full(weight.grad.any()))
    yield from (child for child, nonzero in has_gradient.items() if not nonzero)


def _kl_has_gradient(scores: Scores, part: Rollouts, comm: Comm) -> Check:
    """k3 is flat where both policies agree, as they may at the start; with a shifted reference it must have one."""
    name = "KL has a gradient"
    if scores.kl is not None:  # flat where both policies agree, so only whether it has a graph can be checked
        connected = comm.any(scores.kl.requires_grad)
        detail = "in closed form" if connected else "it has none: look for no_grad and detach in score()."
        return Check(name, connected, detail)
    if scores.reference_logp is None:
        return Check(name, False, "loss.kl is above 0, but score() gives no reference_logp. Give one, or set it to 0.")
    gradient = torch.zeros(1)
    if scores.logp.requires_grad:
        kl = kl_to_reference(scores.logp, scores.reference_logp + 0.5, part.mask, denominator=1.0)
        (gradient,) = torch.autograd.grad(kl, scores.logp, retain_graph=True)
    has_gradient = comm.any(bool(gradient.isfinite().all() and gradient.any()))
    if has_gradient:
        return Check(name, True, f"reference given for {part.mask.sum()} decisions")
    return Check(name, False, "it is zero or not finite: look at reference_logp, and for no_grad.")
