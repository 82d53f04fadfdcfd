"""A workload of one's own: in every room, three corridors with five doors each, and one right door per corridor.

The right doors follow from three pictures in the room, of five kinds each, so the best reward is known: 1.

    groupwise train examples/doors.py
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import nn
from torch.nn.functional import one_hot

import groupwise as gw

DOORS = PICTURES = 5
CORRIDORS = 3
ROOMS = torch.tensor(list(product(range(PICTURES), repeat=CORRIDORS)))
HELD_OUT = ROOMS.sum(1) % 5 == 0


def right_doors(rooms: torch.Tensor) -> torch.Tensor:
    """Each corridor has a picture, and the door that its picture and its number point to."""
    return (2 * rooms + torch.arange(CORRIDORS, device=rooms.device)) % DOORS


def right_share(prompts, completions, **columns) -> list[float]:
    """Reward with TRL's signature: the share of corridors in which the right door was taken."""
    best = right_doors(torch.stack(prompts))
    return (torch.stack(completions) == best).double().mean(1).tolist()


class DoorsReporter(gw.Reporter):
    def describe_rollouts(self, rollouts: gw.Rollouts) -> list[dict]:
        rooms, doors = rollouts.data["rooms"].cpu(), rollouts.data["doors"].cpu()
        return [
            {"room": room.tolist(), "doors": door.tolist(), "right": right_doors(room[None])[0].tolist()}
            for room, door in zip(rooms, doors, strict=True)
        ]


class Doors(gw.Workload):
    reporter = DoorsReporter()

    def __init__(self, hidden: int, device: torch.device):
        torch.manual_seed(0)  # the same weights on every rank
        width = CORRIDORS * PICTURES
        self.policy = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, CORRIDORS * DOORS)).to(
            device
        )
        self.rooms = ROOMS[~HELD_OUT].to(device)
        self.group_ids = torch.tensor([gw.group_id(index, room) for index, room in enumerate(self.rooms)])
        self.num_conditions, self.num_held_out = len(self.rooms), int(HELD_OUT.sum())

    def log_probabilities(self, rooms: torch.Tensor) -> torch.Tensor:
        logits = self.policy(one_hot(rooms, PICTURES).flatten(1).float())
        return logits.view(-1, CORRIDORS, DOORS).log_softmax(-1)

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        rooms = self.rooms[rows.condition]
        logp = self.log_probabilities(rooms)
        uniforms = torch.cat([rows.uniform(decision) for decision in range(CORRIDORS)], dim=1).to(logp)
        doors = (logp.exp().cumsum(-1) < uniforms[:, :, None]).sum(-1).clamp(max=DOORS - 1)
        return gw.Rollouts(
            group_ids=self.group_ids[rows.condition],
            logp=logp.gather(2, doors[:, :, None])[:, :, 0],
            mask=torch.ones_like(doors, dtype=torch.bool),
            data={"rooms": rooms, "doors": doors},
        )

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        return gw.call_rewards({"right": right_share}, list(rollouts.data["rooms"]), list(rollouts.data["doors"]))

    def score(self, rollouts: gw.Rollouts) -> gw.Scores:
        logp = self.log_probabilities(rollouts.data["rooms"])
        taken = logp.gather(2, rollouts.data["doors"][:, :, None])[:, :, 0]
        return gw.Scores(taken, entropy=-(logp.exp() * logp).sum(-1))

    def evaluate(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        rooms = ROOMS[HELD_OUT][rows].to(self.rooms.device)
        greedy = self.log_probabilities(rooms).argmax(-1)
        return {"right doors in rooms never seen (best 1)": (greedy == right_doors(rooms)).float().mean(-1)}


@dataclass(frozen=True)
class DoorsConfig(gw.WorkloadConfig):
    hidden: int = 128
    """Width of the policy's hidden layer."""

    def build(self, device: torch.device) -> Doors:
        return Doors(self.hidden, device)


def recipe() -> gw.Config:
    return gw.Config(
        DoorsConfig(),
        steps=120,
        conditions_per_step=16,
        group_size=8,
        rows_per_pass=16,
        optimizer=gw.OptimizerConfig(learning_rate=1e-2, schedule="linear"),
    )
