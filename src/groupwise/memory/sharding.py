"""What sharding leaves on a rank, and what is gathered for a while: the arithmetic of torch's FSDP2. No torch.

Each block is a unit, and the root is one: all parameters outside of blocks, such as embeddings and head. A rank keeps its
part of each unit in the dtype of training; a unit is gathered in the dtype of computation just before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RolloutMode = Literal["gathered", "blocks"]
ExchangeMode = Literal["step", "pass"]
GATHERED_BLOCKS = "gathered blocks"
ROLLOUT_COPY = "rollout's copy of the weights"
EXCHANGE_BUFFERS = "gradients in exchange"


@dataclass(frozen=True)
class Sharding:
    """Over how many ranks weights, gradients and moments are cut, and what is gathered when."""

    ranks: int
    """Ranks that hold one copy together: all, or those of one node."""
    over: Literal["all", "node"] = "all"
    rollout: RolloutMode = "gathered"
    """gathered: all weights at once, so that ranks decode without waiting for each other. blocks: one after the other."""
    exchange: ExchangeMode = "step"
    """step: gradients of all passes are summed on each rank, uncut, and exchanged once. pass: exchanged and cut after
    each pass, which takes less memory and more traffic."""

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
    compute_bytes: int
    """Of a gathered number, and of its gradient before the exchange."""
    exchange_bytes: int
    """Of a gradient's number in the exchange."""

    def rollout_bytes(self, mode: RolloutMode) -> dict[str, int]:
        """What a rollout gathers; the last block is in the collective's buffer, too, before it is copied out."""
        if mode == "gathered":
            return {ROLLOUT_COPY: (self.all_params + self.block.total) * self.compute_bytes}
        return {GATHERED_BLOCKS: self._gathered_blocks}

    def update_bytes(self) -> dict[str, int]:
        """In a block's backward pass: the block and its gradient; the next block, prefetched; the root; and the buffer
        of the gradient that is being exchanged, which is that of the block before.
        """
        gradient = self.block.trained * self.compute_bytes
        return {
            GATHERED_BLOCKS: self._gathered_blocks,
            EXCHANGE_BUFFERS: gradient + self.block.trained * self.exchange_bytes,
        }

    def root_exchange_bytes(self) -> dict[str, int]:
        """At the end of a backward pass, when the root is cut again: its gradient, and the buffer of the exchange."""
        return {EXCHANGE_BUFFERS: self.root.trained * (self.compute_bytes + self.exchange_bytes)}

    @property
    def _gathered_blocks(self) -> int:
        return (self.root.total + 2 * self.block.total) * self.compute_bytes


def per_rank(size: int, sharding: Sharding | None) -> int:
    """A rank's part of so many bytes, rounded up."""
    return size if sharding is None else -(-size // sharding.ranks)
