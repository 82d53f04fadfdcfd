"""Sharded runs from the command line: killed and resumed, exported, and what is refused."""

import json
import shutil
import subprocess
import sys

import psutil
import pytest
import torch
from processes import ENVIRONMENT, free_port, groupwise, on_ranks, wait_for_steps
from safetensors.torch import load_file
from test_sharded_checkpoints import resume
from tiny.pipelines import save_pipeline
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from groupwise.core.io.files import read_jsonl
from groupwise.workloads.checkpoint_files import read_metadata, read_weights

TRAIN = ("-m", "groupwise", "train", "dist.shard_fakes:recipe", "--shard", "full", "--checkpoint-every", "2")


def parts_of(folder):
    """The tensors of each part. Their order in a file may differ."""
    return {path.name: load_file(path) for path in (folder / "checkpoints" / "step-000008").glob("shard-*")}


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["whole", "blocks"])
def test_killed_and_resumed_a_sharded_run_is_bit_identical(tmp_path, rollout):
    train = [*TRAIN, "--shard-rollout", rollout, "--run-dir"]
    unbroken = on_ranks(2, [*train, tmp_path / "unbroken"])
    assert unbroken.returncode == 0, unbroken.stderr[-3000:]
    gathers = {"whole": "gather all weights first", "blocks": "gather block by block"}[rollout]
    assert f"rollouts {gathers} (--shard-rollout {rollout})" in " ".join(unbroken.stderr.split())
    launch = "-m torch.distributed.run --nproc-per-node 2 --nnodes 1 --master-addr 127.0.0.1 --master-port"
    arguments = [sys.executable, *launch.split(), str(free_port()), *train, str(tmp_path / "killed")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(arguments, env=ENVIRONMENT, text=True, start_new_session=True, **pipes)
    wait_for_steps(tmp_path / "killed", 5, process, seconds=120)
    for each in (*psutil.Process(process.pid).children(recursive=True), process):  # ranks have sessions of their own
        each.kill()
    process.communicate(timeout=30)
    resumed = on_ranks(2, [*train, tmp_path / "killed", "--resume"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "Resuming" in resumed.stderr
    killed, unbroken_parts = parts_of(tmp_path / "killed"), parts_of(tmp_path / "unbroken")
    assert len(unbroken_parts) == 2
    for part, tensors in unbroken_parts.items():
        assert killed[part].keys() == tensors.keys()
        assert all(torch.equal(killed[part][name], tensor) for name, tensor in tensors.items())


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_rank_that_cannot_write_its_part_ends_the_run_on_all_ranks(tmp_path):
    full = [*TRAIN[:3], "dist.shard_fakes:small_disk", *TRAIN[4:], "--run-dir", tmp_path / "run"]
    ended = on_ranks(2, full)
    assert ended.stderr.count("exitcode  : 2") == 2, ended.stderr[-3000:]
    part = ".writing-step-000002/shard-00002-model-00001-of-00001.safetensors cannot be used: File too large"
    assert ended.stderr.count(part) == 2
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    resumed = on_ranks(2, [*TRAIN, "--run-dir", tmp_path / "run", "--resume"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert len(parts_of(tmp_path / "run")) == 2


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_sharded_checkpoint_is_exported_as_a_model_that_transformers_loads(tmp_path):
    resume(tmp_path / "steps", "2-1")
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "steps" / "checkpoints-2", run / "checkpoints")
    checkpoint = run / "checkpoints" / "step-000002"
    (run / "config.json").write_text(json.dumps(read_metadata(checkpoint)["config"]))
    ended = groupwise("export", run, tmp_path / "model", "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout)["kind"] == "a language model"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    weights = dict(model.named_parameters())
    for name, weight in read_weights(checkpoint, ema=True):
        assert_close(weights[name.removeprefix("model.")].double(), weight, rtol=0, atol=1e-6)
    again = groupwise("export", run, tmp_path / "model")
    assert again.returncode == 2
    assert "is not empty" in again.stderr


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_pipeline_with_two_transformers_is_the_same_run_sharded(tmp_path):
    save_pipeline("wan-2.2", tmp_path)
    folder = ["--workload.pipeline", tmp_path / "pipeline", "--workload.data", tmp_path / "rows.jsonl"]
    reward = ["--workload.rewards.functions", "warmth=workloads.flow.small:warmth"]
    size = "--workload.frames 5 --workload.height 16 --workload.width 16 --workload.dtype float32"
    shape = "--conditions-per-step 2 --group-size 2 --rows-per-pass 1 --workload.sampling.num-inference-steps 4"
    more = ["--workload.sampling.window.share", "1.0", "--optimizer.learning-rate", "1e-2", "--steps", "3"]
    train = ["-m", "groupwise", "train", "flow-wan", *folder, *reward, *size.split(), *shape.split(), *more]
    for ranks, flags in ((1, []), (2, ["--shard", "full"])):
        ended = on_ranks(ranks, [*train, *flags, "--run-dir", tmp_path / str(ranks)])
        assert ended.returncode == 0, ended.stderr[-3000:]
    alone, sharded = (
        dict(read_weights(tmp_path / str(ranks) / "checkpoints" / "step-000003", ema=False)) for ranks in (1, 2)
    )
    assert sharded.keys() == alone.keys()
    assert {name.split(".")[0] for name in alone} == {"transformer", "transformer_2"}
    for (
        name,
        weight,
    ) in alone.items():  # they move by 3e-2; by rounding, a few whose gradients are near 0 do so otherwise
        assert (sharded[name] - weight).square().mean().sqrt() < 1e-3, name
    norms, expected = ([step["grad_norm"] for step in read_jsonl(tmp_path / ranks / "metrics.jsonl")] for ranks in "21")
    assert norms == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("longest_prompt", "is_sharded"), [("192", False), ("1000000", True)])
def test_auto_shards_where_the_plan_says_that_a_rank_cannot_hold_all(tmp_path, longest_prompt, is_sharded):
    """The plan counts the longest prompt; those of the recipe are short."""
    train = ["-m", "groupwise", "train", "chat", "--workload.data.max-prompt-tokens", longest_prompt, "--steps", "1"]
    ended = on_ranks(2, [*train, "--shard", "auto", "--run-dir", tmp_path / "run"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    parts = list((tmp_path / "run" / "checkpoints" / "step-000001").glob("shard-*"))
    assert len(parts) == (2 if is_sharded else 0)
    assert ("Sharded over 2 ranks; rollouts gather block by block (the memory plan)" in ended.stderr) == is_sharded


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (1, ["dist.shard_fakes:recipe"], "shard is 'full' and there is one rank"),
        (2, ["dist.shard_fakes:without_blocks"], "there is no list of layers (nn.ModuleList) in it"),
    ],
)
def test_what_cannot_be_sharded_is_refused(tmp_path, ranks, flags, message):
    program = ["-m", "groupwise", "train", *flags, "--shard", "full", "--run-dir", tmp_path / "run", "--json"]
    ended = on_ranks(ranks, program)
    assert message in ended.stderr, ended.stderr[-2000:]
    assert message in json.loads(ended.stdout)["error"]
    assert "exitcode  : 2" in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_launchers_with_a_copy_on_each_node_make_the_run_of_one_process(tmp_path):
    alone = groupwise("train", "dist.shard_fakes:recipe", "--run-dir", tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr[-2000:]
    port = str(free_port())
    launch = "-m torch.distributed.run --nproc-per-node 2 --nnodes 2 --master-addr 127.0.0.1 --master-port"
    flags = [*TRAIN, "--shard-over", "node", "--run-dir", str(tmp_path / "nodes")]
    nodes = [
        subprocess.Popen(
            [sys.executable, *launch.split(), port, "--node-rank", str(node), *flags],
            env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"},
            text=True,
            stderr=subprocess.PIPE,
        )
        for node in (0, 1)
    ]
    for process in nodes:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr[-3000:]
    expected = dict(read_weights(tmp_path / "alone" / "checkpoints" / "step-000008", ema=False))
    weights = dict(read_weights(tmp_path / "nodes" / "checkpoints" / "step-000008", ema=False))
    written = parts_of(tmp_path / "nodes").values()
    numbers = sum(
        tensor.numel() for tensors in written for name, tensor in tensors.items() if name.startswith("policy/")
    )
    assert numbers == sum(weight.numel() for weight in expected.values())  # of one copy
    for name, weight in expected.items():
        assert_close(weights[name], weight, rtol=0, atol=1e-12)
