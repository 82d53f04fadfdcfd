"""Tiny pipeline folders that the tests of models, pipelines and refusals share."""

import json

import numpy as np
import pytest
import torch

from groupwise.workloads.flow.cameras import motion_to_pose
from workloads.flow.tiny_folders import clip_file, sd3_folder, wan_folder


@pytest.fixture(scope="session")
def wan(tmp_path_factory):
    return wan_folder(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Four conditions: one prompt, one clip, four cameras."""
    folder = tmp_path_factory.mktemp("data")
    clip_file(folder / "clip.npy", 5)
    lines = []
    for nth in range(4):
        np.save(folder / f"camera{nth}.npy", motion_to_pose(torch.linspace(0, 0.1 * nth, 12).view(2, 6)).numpy())
        lines.append({"prompt": "a cat by the sea", "video": "clip.npy", "camera": f"camera{nth}.npy", "weight": nth})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "train.jsonl"


@pytest.fixture(scope="session")
def sd3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    sd3_folder(folder / "pipeline")
    (folder / "prompts.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a dog by the sea"}\n')
    return folder
