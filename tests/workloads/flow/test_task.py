"""What identifies a condition."""

from dataclasses import replace

import pytest
import torch
from tiny.pixel_clips import pixel_conditions

import groupwise as gw
from groupwise.core.groups import check_groups
from groupwise.workloads.flow.task import group_ids


def test_a_group_id_is_made_from_prompt_clip_camera_and_name():
    (condition,) = pixel_conditions(torch.arange(1))
    moved = replace(condition, camera=condition.camera.flip(0))
    others = [
        replace(condition, prompt="at dusk"),
        replace(condition, source_clip=condition.source_clip + 1e-6),
        moved,
        replace(condition, name="another"),
    ]
    ids = [int(group_ids([other])[0]) for other in (condition, *others)]
    assert len(set(ids)) == 5
    assert group_ids([condition]).tolist() == group_ids([condition]).tolist()
    with pytest.raises(gw.UserError, match="do not share one condition"):
        check_groups(torch.tensor([0, 0]), torch.tensor([ids[0], ids[3]]))
