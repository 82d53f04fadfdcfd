"""The recipe on a MolmoE folder: trained, and served within a budget."""

import json

import numpy as np
import pytest
from PIL import Image
from tiny.molmoe import ASSET, published_config
from tiny.vqa import write_lines

import groupwise
from groupwise.cli.main import main
from groupwise.workloads.controller.model.molmoe.sizes import image_token_count, read_sizes
from groupwise.workloads.controller.tasks.vqa.config import VqaConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step, by the published crop rule."""
    folder = tmp_path_factory.mktemp("run")
    paths = write_lines(folder / "data", 12)
    settings = {
        "workload.model": ASSET,
        "workload.questions": paths["questions"],
        "workload.images": paths["images"],
        "workload.estimator": "proportional",
        "workload.selection-share": 0.5,
        "workload.max-new-tokens": 2,
        "workload.held-out-questions": 1,
        "workload.budget.values": 1.0,
        "workload.answers": folder / "answers.db",
        "steps": 1,
        "conditions-per-step": 2,
        "group-size": 2,
        "run-dir": folder / "run",
    }
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    arguments += ["--workload.published-crop-rule", "--workload.crops", "low", "1", "high", "2"]
    assert main(["train", "controller-molmoe", *arguments, "--json"]) == 0
    return folder / "run"


def test_a_trained_controller_serves_the_published_folder(run):
    model = groupwise.AdaptiveModel.load(run)
    assert model.loaded.model.config.published_crop_rule
    noise = np.random.default_rng(0).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    full = model.estimate(image, "what is this")
    reply = model.generate(image, "what is this", budget_ms=2 * full.upper_ms)
    (again,) = model.generate_batch([(image, "what is this", 2 * full.upper_ms)])
    assert reply.answer == again.answer
    assert reply.knobs.tier in ("low", "high")
    assert min(reply.measured.stages_ms[stage] for stage in ("vision", "prefill", "decode")) > 0


def test_a_checkpoint_says_how_the_model_is_loaded(run):
    settings = json.loads(next(run.glob("checkpoints/*/config.json")).read_text())
    assert settings["published_crop_rule"] is True
    assert settings["options"]["crops_by_tier"] == {"low": 1, "high": 2}


def test_the_plan_takes_the_longest_tiling(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published_config()))
    memory = VqaConfig(model=str(tmp_path)).memory_model()
    assert memory.crops == {"low": 4, "medium": 7, "high": 13}
    longest = max(image_token_count(rows, columns) for rows in range(1, 13) for columns in range(1, 12 // rows + 1))
    assert memory.vision.image_tokens(13) == longest == 160 + 100 * 13
    sizes = read_sizes(published_config(), "published")
    assert sum(memory.frozen_params.values()) == memory.text.parameters + memory.vision.parameters + 128 * 2048
    assert memory.text.max_positions == sizes.max_tokens == 4096
