"""What sharding leaves on a rank, and what is gathered for a while: the arithmetic of torch's FSDP2. No torch.

Each block is a unit, and the root is one: all parameters outside of blocks, such as embeddings and head. A rank keeps
its part of each unit in the dtype of training; a unit is gathered in the dtype of computation just before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from groupwise.core.errors import UserError

RolloutMode = Literal["auto", "whole", "blocks"]
ExchangeMode = Literal["pass", "update"]
GATHERED_BLOCKS = "gathered blocks"
ROLLOUT_COPY = "rollout's copy of the weights"
EXCHANGE_BUFFERS = "gradients in exchange"


@dataclass(frozen=True)
class Sharding:
    """Over how many ranks weights, gradients and moments are cut, and what is gathered when."""

    ranks: int
    """Ranks that hold one copy together: all, or those of one node."""
    over: Literal["all", "node"] = "all"
    rollout: RolloutMode = "auto"
    """whole: all weights at once, so that ranks decode without waiting for each other. blocks: one at a time. auto:
    whole where that fits; `evaluate_setting` decides."""
    exchange: ExchangeMode = "pass"
    """As Config.shard_exchange: update sums the gradients of all passes uncut on each rank and exchanges them once."""

    def on_ranks(self, ranks: int) -> Sharding | None:
        """The same on another number of ranks; None where one rank would hold everything."""
        shared_by = ranks if self.over == "all" else min(ranks, self.ranks)
        return Sharding(shared_by, self.over, self.rollout, self.exchange) if shared_by > 1 else None


@dataclass(frozen=True)
class UnitParams:
    """Parameters that are gathered together."""

    frozen: int = 0
    trained: int = 0

    @property
    def total(self) -> int:
        return self.frozen + self.trained


@dataclass(frozen=True)
class ShardUnits:
    """The units of a model, as far as they decide what is gathered at a peak."""

    block: UnitParams
    """The largest block."""
    root: UnitParams
    all_params: int
    """That a rollout uses: of all blocks and the root."""
    all_trained: int
    compute_bytes: int
    """Of a gathered number, and of its gradient before the exchange."""
    exchange_bytes: int
    """Of a gradient's number in the exchange."""

    def in_rollout(self, mode: RolloutMode, stages: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
        """Candidates for the peak of a rollout, from those of a model that is not sharded.

        Block by block: the root and a block, with the buffers of this one and of the next one, which is asked for
        before a block computes. Whole: all weights; and before the first row, the last block in its buffer, too.
        """
        if mode == "blocks":
            return [{GATHERED_BLOCKS: self._gathered(blocks=3), **stage} for stage in stages]
        whole, block = self.compute_bytes * self.all_params, self.compute_bytes * self.block.total
        return [{ROLLOUT_COPY: whole + block}, *({ROLLOUT_COPY: whole, **stage} for stage in stages)]

    def at_root(self) -> dict[str, int]:
        """Between the forward and the backward pass: the root, and the buffer of a block."""
        return {GATHERED_BLOCKS: self._gathered(blocks=1)}

    def in_last_block(self, sharding: Sharding, *, sums_uncut: bool) -> dict[str, int]:
        """In the last block, with all activations, in whichever of the two passes takes more.

        Forward: the block, its buffer, and that of the block before. Backward: the block and its gradient, and the next
        block's buffer. Where uncut gradients are summed, what the exchange of a block holds besides them is its buffer
        and the block's cut gradient.
        """
        trained = self.block.trained
        forward = {GATHERED_BLOCKS: self._gathered(blocks=3)}
        if sums_uncut:
            buffer = trained * self.exchange_bytes
            backward = {
                GATHERED_BLOCKS: self._gathered(blocks=1),
                EXCHANGE_BUFFERS: buffer + per_rank(buffer, sharding),
            }
        else:
            backward = {GATHERED_BLOCKS: self._gathered(blocks=2), EXCHANGE_BUFFERS: trained * self.compute_bytes}
        return max(forward, backward, key=lambda parts: sum(parts.values()))

    def in_block_before(self) -> dict[str, int]:
        """In the backward pass of a block, with the gradient of the block behind it in exchange."""
        gradients = self.block.trained * (self.compute_bytes + self.exchange_bytes)
        return {GATHERED_BLOCKS: self._gathered(blocks=2), EXCHANGE_BUFFERS: gradients}

    def at_start(self) -> dict[str, int]:
        """When a forward pass begins: root and first block, both with their buffers."""
        return {GATHERED_BLOCKS: 2 * self.compute_bytes * (self.root.total + self.block.total)}

    def at_end(self, *, sums_uncut: bool) -> dict[str, int]:
        """When a backward pass ends: the root's gradient, and the buffer of its exchange."""
        gradient = self.exchange_bytes if sums_uncut else self.compute_bytes
        return {EXCHANGE_BUFFERS: self.root.trained * (gradient + self.exchange_bytes)}

    @property
    def cut_before_last_block(self) -> int:
        """Trained parameters with exchanged gradients when the last block but one is in its backward pass."""
        return self.all_trained - self.root.trained - 2 * self.block.trained

    def _gathered(self, blocks: int) -> int:
        return self.compute_bytes * (self.root.total + blocks * self.block.total)


def ranks_per_copy(ranks: int, *, over: Literal["all", "node"], ranks_per_node: int) -> int:
    """How many ranks hold a whole copy together; refuses what cannot be shared."""
    if ranks == 1:
        raise UserError(
            "shard is 'full' and there is one rank, so there is nothing to share. Give the number of your cards with"
            " --ranks, such as --ranks 8, or take --shard auto, which shards only where there are several."
        )
    shared_by = ranks if over == "all" else min(ranks, ranks_per_node)
    if shared_by == 1 or ranks % shared_by:
        raise UserError(
            f"shard_over is 'node', and {ranks} ranks are not divided evenly by nodes of {ranks_per_node}, at least 2"
            " of which must hold a copy together. Take a multiple, or --shard-over all."
        )
    return shared_by


def per_rank(size: int, sharding: Sharding | None) -> int:
    """A rank's part of so many bytes, rounded up."""
    return size if sharding is None else -(-size // sharding.ranks)
