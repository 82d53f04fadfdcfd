"""Every command and snippet in README and docs runs, in shrunken form: a documented command is never refused."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from markdown_blocks import ROOT, PageRunner, read_blocks
from PIL import Image
from tiny.chat import write_lines
from tiny.llama import qwen3, save_model
from tiny.llava import save_llava
from tiny.molmoe import copy_folder, published_config
from tiny.vqa import write_vqa
from tiny.wan import save_noise_clip, save_tiny_wan

from groupwise.workloads.flow.data.cameras import motion_to_pose

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def write_questions(folder):
    folder.mkdir()
    rows = [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in range(8)]
    write_lines(folder / "train.jsonl", rows)


def write_rewards(folder):
    folder.mkdir()
    body = "def {name}(prompts, completions, **columns):\n    return [float(index) for index in range(len(prompts))]\n"
    (folder / "my_rewards.py").write_text("".join(body.format(name=name) for name in ("polite", "quality", "accuracy")))


def write_photo(folder):
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "photo.jpg")


def write_clips(folder):
    folder.mkdir()
    save_noise_clip(folder / "clip.npy", 5)
    rows = []
    for index in range(2):
        np.save(folder / f"{index}.npy", motion_to_pose(torch.linspace(0, 0.1 * index, 12).view(2, 6)).numpy())
        rows.append({"prompt": "a cat", "video": "clip.npy", "camera": f"{index}.npy"})
    write_lines(folder / "train.jsonl", rows)


def write_qwen_config(folder):
    folder.mkdir()
    (folder / "config.json").write_text(qwen3().config.to_json_string(use_diff=False))


def write_published_molmoe(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config()))


FIXTURES = {
    "llama": lambda path: save_model(path, positions=512),
    "questions": write_questions,
    "rewards": write_rewards,
    "llava": save_llava,
    "molmoe": copy_folder,
    "molmoe_published": write_published_molmoe,
    "vqa": lambda path: write_vqa(path, 12),
    "photo": write_photo,
    "wan": save_tiny_wan,
    "clips": write_clips,
    "qwen_config": write_qwen_config,
}
"""What the pages name as the user's own: real files of real classes, tiny."""


@pytest.fixture
def scratch(tmp_path):
    """A folder as a user has it after cloning: the examples are there."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    return tmp_path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page, scratch):
    runner = PageRunner(scratch, FIXTURES)
    for block in read_blocks(page):
        runner.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_images_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def write(folder, text):
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_a_command_that_is_refused_fails_its_page(tmp_path):
    page = write(tmp_path, "```sh\ngroupwise place --conditions 3 --group-size 1 --ranks 2\n```\n")
    (block,) = read_blocks(page)
    with pytest.raises(AssertionError, match=r"(?s)page.md, line 1: .*exit code 2"):
        PageRunner(tmp_path, {}).run(block)
    PageRunner(tmp_path, {}).run(read_blocks(write(tmp_path, "<!-- test: exits 2 -->\n" + page.read_text()))[0])


def test_blocks_are_shrunken_and_share_their_names(tmp_path):
    page = write(
        tmp_path,
        "<!-- test: 10 ** 6 = 3; BIG = @words -->\n```python\nvalues = [0] * 10 ** 6\ntext = open('BIG').read()\n```\n"
        "```\nnot run\n```\n"
        "```python\nassert len(values) == 3 and text == 'x'\n```\n",
    )
    runner = PageRunner(tmp_path, {"words": lambda path: path.write_text("x")})
    for block in read_blocks(page):
        runner.run(block)
    assert [block.line for block in read_blocks(page)] == [2, 9]


def test_commands_cannot_hide_in_indented_blocks(tmp_path):
    with pytest.raises(AssertionError, match="fenced `sh` block"):
        read_blocks(write(tmp_path, "text\n\n    groupwise train chat\n"))
