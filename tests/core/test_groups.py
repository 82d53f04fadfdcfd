import hashlib

import pytest
import torch

from groupwise.core.errors import UserError
from groupwise.core.groups import check_groups, content_hash, group_id


def test_equal_content_gives_equal_ids_and_any_change_another():
    camera = torch.arange(6.0).view(2, 3)
    same = group_id(3, "a prompt", camera, 0.5)
    assert same == group_id(3, "a prompt", camera.clone(), 0.5)
    others = [
        group_id(4, "a prompt", camera, 0.5),
        group_id(3, "a prompt ", camera, 0.5),
        group_id(3, "a prompt", camera + 1e-6, 0.5),
        group_id(3, "a prompt", camera.view(3, 2), 0.5),
        group_id(3, "a prompt", camera.double(), 0.5),
        group_id(3, "a prompt", camera, None),
        group_id(3, "a promp", "t", camera, 0.5),
    ]
    assert len({same, *others}) == 8
    assert -(2**63) <= same < 2**63


def test_a_content_hash_is_blake2b_of_all_parts():
    assert content_hash("ab", b"c") == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert content_hash("abc", digest_size=8) == hashlib.blake2b(b"abc", digest_size=8).hexdigest()


def test_what_cannot_be_hashed_faithfully_is_refused():
    with pytest.raises(UserError, match="was given list"):
        group_id(0, [1.0, 2.0])


def test_members_that_redraw_their_condition_are_found():
    placed = torch.tensor([0, 1, 0, 1])
    check_groups(placed, torch.tensor([70, 80, 70, 80]))
    with pytest.raises(UserError, match="group 1 do not share one condition"):
        check_groups(placed, torch.tensor([70, 80, 70, 81]))


def test_one_key_for_all_groups_is_found():
    with pytest.raises(UserError, match="2 groups carry the same id 7"):
        check_groups(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 7, 7]))
