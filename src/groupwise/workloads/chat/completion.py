"""What a rollout of one prompt is: token ids, and what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Completion:
    """Tokens that were drawn. They stay ids: nothing is decoded and encoded again. All tensors are on the CPU."""

    ids: tuple[int, ...]
    logps: Float[Tensor, " tokens"]
    """In the distribution that was sampled from."""
    entropies: Float[Tensor, " tokens"]
    stopped: bool
    """Whether it ended by a stop token (its last one); if not, it was truncated."""
    kept: Int64[Tensor, " tokens"] | None = None
    """How many tokens top-k and top-p left each time; None where they are off."""

    def __len__(self) -> int:
        return len(self.ids)


def padded(rows: Sequence[Float[Tensor, " tokens"]], width: int | None = None) -> Float[Tensor, "rows longest"]:
    """Rows side by side, zeros on the right, at least `width` wide."""
    table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return torch.nn.functional.pad(table, (0, max(0, (width or 0) - table.shape[1])))


def token_mask(completions: Sequence[Completion], width: int | None = None) -> Bool[Tensor, "rows longest"]:
    """True where a row has a token."""
    lengths = torch.tensor([len(completion) for completion in completions])
    longest = max(int(lengths.max()), width or 0)
    return torch.arange(longest)[None] < lengths[:, None]
