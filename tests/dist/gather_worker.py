"""Rollouts block by block on two ranks, the second of which has no memory for a block that the first one asks for.

    torchrun ... gather_worker.py OUTPUT.json       (what each rank raised, and whether its next attempt was right)

The memory of its process is limited, so allocations fail for real.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from groupwise.core.errors import OutOfMemoryError
from groupwise.dist.comm import Comm, connect, disconnect, exit_now
from groupwise.dist.sharding import rollout_weights, shard

WIDTH = 3000
"""Of the large block: 69 MiB in float64."""
ROOM = 40 << 20


class Policy(nn.Module):
    """A large block, and a small one whose gathered weights are no buffer for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 4, dtype=torch.float64)
        sizes = (WIDTH, 4)
        self.blocks = nn.ModuleList(nn.Linear(size, size, bias=False, dtype=torch.float64) for size in sizes)

    def run(self, block: int) -> Tensor:
        layer = self.blocks[block]
        output: Tensor = layer(torch.ones(1, layer.in_features, dtype=torch.float64))
        return output


@contextmanager
def limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(comm: Comm, policy: Policy, expected: list[Tensor], blocks: list[int]) -> dict[str, object]:
    """What running these blocks raises where the second rank is limited, and whether it is right where it is not."""

    def run() -> list[Tensor]:
        with comm.fail_together("Running the policy"), rollout_weights(policy), torch.inference_mode():
            return [policy.run(block).clone() for block in blocks]

    run()
    try:
        with nullcontext() if comm.is_main else limited_memory():
            run()
        raised = ""
    except OutOfMemoryError as error:
        raised = str(error)
    outputs = run()
    return {"raised": raised, "is_right": all(map(torch.equal, outputs, [expected[block] for block in blocks]))}


if __name__ == "__main__":
    comm, policy = connect("cpu"), Policy()
    with torch.inference_mode():
        expected = [policy.run(block).clone() for block in range(2)]
    shard(policy, list(policy.blocks), comm, rollout="blocks")
    cases = {"ahead": [1], "finished": []}
    outcomes = {
        name: comm.gather_objects([outcome(comm, policy, expected, [0] if comm.is_main else blocks)])
        for name, blocks in cases.items()
    }
    if comm.is_main:
        Path(sys.argv[1]).write_text(json.dumps(outcomes))
    disconnect()
    exit_now()
