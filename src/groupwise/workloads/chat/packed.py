"""Prompts and completions in one row without padding: a prompt once, its completions after it, all seeing it.

Every token goes through the network once. A completion's tokens attend to their prompt (its keys and values are not
copied) and to what stands before them in their own completion; gradients flow back into the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from groupwise.workloads.chat.own_tokens import OwnTokens, own_tokens
from groupwise.workloads.chat.packed_attention import attend_by_blocks, attend_by_parts

KeysAndValues = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Packed:
    """[prompt 0, prompt 1, ..., completions of prompt 0, of prompt 1, ...] as one sequence."""

    prompts: Sequence[slice]
    tails: Sequence[slice]
    """The tokens of each prompt's completions, in the prompts' order."""
    own: Sequence[OwnTokens]
    ids: Int64[Tensor, " tokens"]
    positions: Int64[Tensor, " tokens"]
    group: Int64[Tensor, " tokens"]
    row: Int64[Tensor, " tokens"]
    """Number of the completion, or -1 in a prompt."""
    keep: KeysAndValues | None = None
    """Where to leave the keys and values of each layer, if anywhere."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `attention.Layout`; the batch is one sequence."""
        if self.keep is not None:
            self.keep[layer] = (key[0], value[0])
        if query.device.type == "cpu":
            return attend_by_parts(query, key, value, self, scale)
        return attend_by_blocks(query, key, value, self.block_mask, scale)

    @cached_property
    def predicting(self) -> Int64[Tensor, " predicting"]:
        """The last token of each prompt, then all of the completions."""
        last = [prompt.stop - 1 for prompt in self.prompts]
        return torch.tensor([*last, *range(self.prompts[-1].stop, len(self.ids))], device=self.ids.device)

    @cached_property
    def block_mask(self) -> Any:
        """Who sees whom, for flex attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own_or_prompt = (self.row[key] < 0) | (self.row[key] == self.row[query])
            return (self.group[key] == self.group[query]) & own_or_prompt & (key <= query)

        tokens = len(self.ids)
        # Compiled, else the whole table of who sees whom is held for a moment.
        compiled = self.ids.device.type != "cpu"
        return create_block_mask(sees, None, None, tokens, tokens, device=str(self.ids.device), _compile=compiled)


def pack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
    keep: KeysAndValues | None = None,
) -> Packed:
    """completions[g] are those of prompts[g]; an empty one takes no place."""
    members = [len(group) for group in completions]
    segments = [*prompts, *(ids for group in completions for ids in group)]
    groups = [*range(len(prompts)), *(nth for nth, count in enumerate(members) for _ in range(count))]
    rows = [*([-1] * len(prompts)), *range(sum(members))]
    firsts = [*([0] * len(prompts)), *(len(prompts[group]) for group in groups[len(prompts) :])]
    sizes = torch.tensor([len(ids) for ids in segments])
    starts = sizes.cumsum(0) - sizes

    def spread(values: Sequence[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(sizes).to(device)

    places = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    slices = _neighbours([*map(len, prompts), *(sum(map(len, group)) for group in completions)])
    return Packed(
        prompts=slices[: len(prompts)],
        tails=slices[len(prompts) :],
        own=own_tokens(starts[len(prompts) :], sizes[len(prompts) :], device),
        ids=torch.tensor([token for ids in segments for token in ids], device=device),
        positions=places.to(device) + spread(firsts),
        group=spread(groups),
        row=spread(rows),
        keep=keep,
    )


def _neighbours(sizes: Sequence[int]) -> list[slice]:
    """Slices of these sizes, one after another."""
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
