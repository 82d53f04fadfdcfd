"""Tiny pipeline folders and conditions that several test files share."""

import json

import numpy as np
import pytest
import torch
from tiny.pipelines import save_pipeline
from tiny.sd3 import save_tiny_sd3
from tiny.wan import save_noise_clip, save_tiny_wan

from groupwise.workloads.flow.data.cameras import motion_to_pose


@pytest.fixture(scope="session")
def wan(tmp_path_factory):
    return save_tiny_wan(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Four conditions: one prompt, one clip, four cameras."""
    folder = tmp_path_factory.mktemp("data")
    save_noise_clip(folder / "clip.npy", 5)
    lines = []
    for index in range(4):
        camera = motion_to_pose(torch.linspace(0, 0.1 * index, 12).view(2, 6))
        np.save(folder / f"camera{index}.npy", camera.numpy())
        files = {"video": "clip.npy", "camera": f"camera{index}.npy"}
        lines.append({"prompt": "a cat by the sea", **files, "weight": index})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "train.jsonl"


@pytest.fixture(scope="session")
def sd3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd3")
    save_tiny_sd3(folder / "pipeline")
    (folder / "prompts.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a dog by the sea"}\n')
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of tiny.pipelines by name, made when they are asked for."""
    made = {}

    def folder_of(name):
        if name not in made:
            made[name] = save_pipeline(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder_of
