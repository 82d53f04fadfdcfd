"""What a run trained, loaded by the real pipelines, computes what the run's own policy computes."""

import json
import shutil
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from strangers import hash_tensor_files
from tiny.pipelines import config_of
from tiny.wan import LORA, tiny_recam
from torch.testing import assert_close

import groupwise as gw
from groupwise.cli.main import main
from groupwise.workloads.flow.config import TrainedPartsConfig
from groupwise.workloads.flow.export import export
from groupwise.workloads.flow.models.camera_layers import camera_weights
from groupwise.workloads.flow.models.checkpoints import read_weights
from groupwise.workloads.flow.sampling.schedule import WindowConfig
from groupwise.workloads.flow.workload import FlowWorkload
from workloads.flow.small import CPU


def trained(folder, workload, **optimizer):
    """A run of two steps, and its workload with the weights of the checkpoint."""
    config = gw.Config(
        workload,
        steps=2,
        conditions_per_step=2,
        group_size=2,
        rows_per_pass=4,
        optimizer=gw.OptimizerConfig(learning_rate=0.05, **optimizer),
        run=gw.RunConfig(run_dir=folder, preflight=False),
    )
    gw.train(config)
    return load_trained(workload, folder / "checkpoints" / "step-000002" / "policy.safetensors")


def load_trained(config, file) -> FlowWorkload:
    built = config.build(CPU)
    weights = {**dict(built.policy.named_parameters()), **dict(built.policy.named_buffers())}
    with torch.no_grad():
        for name, weight in read_weights(file).items():
            weights[name].copy_(weight)
    return built


def outputs(workload, transformers=None):
    """Velocities at a high and a low noise level; of other transformers where they are given."""
    model = workload.model
    if transformers is not None:
        for name, transformer in transformers.items():
            if hasattr(model, "_transformers"):
                model._transformers[name] = transformer
            else:
                model.policy = transformer
    latents = torch.randn(1, *workload.latent_shape, generator=torch.Generator().manual_seed(4))
    velocity = workload.velocity(workload.conditioning, torch.tensor([1]))
    with torch.no_grad():
        return torch.cat([velocity(latents, torch.tensor([level])) for level in (0.97, 0.2)])


@pytest.mark.parametrize("name", ["wan-2.1", "wan-2.2", "sd3", "flux-dev", "qwen-image"])
def test_pipelines_load_an_adapter_with_its_scale(folders, tmp_path, name):
    config = config_of(folders(name), name, train=replace(LORA, lora_alpha=7))  # alpha / rank = 3.5
    if name == "wan-2.2":  # windows of its two steps: high and high, high and low
        window = WindowConfig("sliding", share=1.0, size=2)
        config = replace(config, sampling=replace(config.sampling, num_inference_steps=4, window=window))
    run = trained(tmp_path / "run", config)
    base, expected = outputs(config.build(CPU)), outputs(run)
    assert ((expected - base).abs().flatten(1).amax(1) > 1e-3).all()  # at both noise levels
    export(tmp_path / "run", tmp_path / "out")
    pipeline = DiffusionPipeline.from_pretrained(folders(name) / "pipeline")
    pipeline.load_lora_weights(tmp_path / "out")
    transformers = {"transformer": pipeline.transformer}
    if name == "wan-2.2":
        pipeline.load_lora_weights(tmp_path / "out" / "transformer_2", load_into_transformer_2=True)
        transformers["transformer_2"] = pipeline.transformer_2
    assert_close(outputs(config.build(CPU), transformers), expected, rtol=0, atol=1e-5)
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    merged = {
        part: type(transformer).from_pretrained(tmp_path / "merged", subfolder=part)
        for part, transformer in transformers.items()
    }
    assert_close(outputs(config.build(CPU), merged), expected, rtol=0, atol=1e-5)


def test_whole_transformers_and_averaged_weights(folders, tmp_path):
    config = config_of(folders("wan-2.1"), "wan-2.1", train=TrainedPartsConfig("all"))
    run = trained(tmp_path / "run", config, ema_decay=0.5)
    averaged = load_trained(config, tmp_path / "run" / "checkpoints" / "step-000002" / "ema.safetensors")
    for ema, workload in ((False, run), (True, averaged)):
        export(tmp_path / "run", tmp_path / f"out {ema}", ema=ema)
        loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / f"out {ema}", subfolder="transformer")
        for name, weight in workload.policy.named_parameters():
            assert torch.equal(loaded.get_parameter(name), weight)


def test_camera_layers_become_a_checkpoint_of_recammaster(wan, data, tmp_path):
    config = tiny_recam(wan, data)
    run = trained(tmp_path / "run", config)
    with pytest.raises(gw.UserError, match=r"Leave --adapter out .*merge=True\): recam\.ckpt is written"):
        export(tmp_path / "run", tmp_path / "out")
    own = replace(config, camera_layers=tmp_path / "run" / "checkpoints" / "step-000002")
    with pytest.raises(
        gw.UserError, match=r"`groupwise export RUN FOLDER` merges it .* the recam\.ckpt that it writes"
    ):
        own.build(CPU)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    names = read_weights(tmp_path / "out" / "recam.ckpt")
    assert {"blocks.0.cam_encoder.weight", "blocks.1.self_attn.q.weight", "head.modulation"} <= names.keys()
    again = replace(config, camera_layers=tmp_path / "out" / "recam.ckpt").build(CPU)
    assert any(weight.abs().max() > 0 for weight in camera_weights(again.policy).values())
    assert_close(outputs(again), outputs(run), rtol=0, atol=1e-5)


def test_the_command_writes_what_the_function_writes(folders, tmp_path):
    run = tmp_path / "run"
    trained(run, config_of(folders("sd3"), "sd3"), ema_decay=0.5)
    cases = [
        (["--adapter"], {"ema": True}),
        (["--adapter", "--weights", "trained"], {}),
        (["--weights", "averaged"], {"ema": True, "merge": True}),
    ]
    for number, (flags, options) in enumerate(cases):
        command, function = tmp_path / f"command{number}", tmp_path / f"function{number}"
        assert main(["export", str(run), str(command), *flags]) == 0
        export(run, function, **options)
        (ours,), (theirs,) = (list(folder.rglob("*.safetensors")) for folder in (command, function))
        assert ours.relative_to(command) == theirs.relative_to(function)
        assert_close(read_weights(ours), read_weights(theirs), rtol=0, atol=0)


def test_what_cannot_be_exported_is_refused(wan, data, tmp_path):
    with pytest.raises(gw.UserError, match="holds no checkpoint of a run"):
        export(tmp_path, tmp_path / "out")
    trained(tmp_path / "run", tiny_recam(wan, data))
    with pytest.raises(gw.UserError, match=r"had no --optimizer\.ema-decay"):
        export(tmp_path / "run", tmp_path / "out", ema=True, merge=True)


STRANGE_SETTINGS = [
    {"train": 5},
    {"train": {"part": "everything"}},
    {"train": {"lora_targets": [1]}},
    {"train": {"part": "lora", "lora_rank": 10**12, "lora_targets": ["to_q"]}},
    {"dtype": "os"},
    {"dtype": "load"},
    {"pipeline": ["x"]},
    {"pipeline": "\0"},
    {"pipeline": "/nowhere"},
    {"camera_layers": 7},
]


def test_a_strangers_run_is_refused_in_a_sentence(folders, tmp_path, capsys):
    run = tmp_path / "run"
    trained(run, config_of(folders("sd3"), "sd3"))
    settings = json.loads((run / "config.json").read_text())

    def refused(content):
        (run / "config.json").write_text(content)
        assert main(["export", str(run), str(tmp_path / "out")]) == 2, content[:300]
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    for strange in STRANGE_SETTINGS:
        refused(json.dumps({**settings, "workload": {**settings["workload"], **strange}}))
    for content in ("[" * 100_000 + "]" * 100_000, "[]", json.dumps({**settings, "workload": []})):
        refused(content)
    pipeline = tmp_path / "pipeline"
    shutil.copytree(folders("sd3") / "pipeline", pipeline)
    index = json.loads((pipeline / "model_index.json").read_text())
    moved = json.dumps({**settings, "workload": {**settings["workload"], "pipeline": str(pipeline)}})
    for strange in (
        "[]",
        json.dumps({**index, "transformer": ["os", "logging"]}),
        json.dumps({**index, "transformer": 3}),
    ):
        (pipeline / "model_index.json").write_text(strange)
        refused(moved)
    (pipeline / "model_index.json").write_text(json.dumps(index))
    weights = next((pipeline / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "transformer" in refused(moved)
    checkpoint = run / "checkpoints" / "step-000002"
    saved = read_weights(checkpoint / "policy.safetensors")
    name = next(iter(saved))
    for other in ({**saved, name: saved[name][:-1]}, {**saved, "more": torch.zeros(3)}):
        save_file(other, checkpoint / "policy.safetensors")
        hash_tensor_files(checkpoint)
        assert "does not belong to this model" in refused(json.dumps(settings))
