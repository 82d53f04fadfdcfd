"""Sharded plans: by hand for models of 8, 32 and 70 billion parameters, and against torch's FSDP2."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist  # noqa: TID251 - the plan is compared with what torch itself does
from hypothesis import given
from hypothesis import strategies as st
from processes import ENVIRONMENT, on_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from groupwise.core.errors import UserError
from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.plan import evaluate_setting, fewest_ranks, make_plan, needs_sharding
from groupwise.memory.sharding import EXCHANGE_BUFFERS, GATHERED_BLOCKS, ROLLOUT_COPY, Sharding
from groupwise.memory.stages import StepSpec
from groupwise.workloads.chat.memory import ChatMemory

from . import shard_peaks
from .sharded_llama import CONFIG, TOKENS, measure_peaks

GIB = 1 << 30
QWEN_8B = {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN_8B |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936}
QWEN_32B = {"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64}
QWEN_32B |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600, "vocab_size": 151936}
LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
LLAMA_70B |= {"num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256}


def chat(content, **fields):
    return ChatMemory(architecture(content), 512, 2048, dtype="bfloat16", checkpointing=True, **fields)


def spec_on(ranks, *, shard=True, rows=8, conditions=32, **modes):
    shape = StepShape(10**9, conditions, 8, ranks, rows, "whole")
    return StepSpec(shape, sharding=Sharding(ranks, **modes) if shard else None)


def test_an_8b_model_by_hand():
    # a layer: 4096 x (2 x 4096 + 2 x 1024) attention, 3 x 4096 x 12288 feed-forward, 2 x 4096 + 2 x 128 norms
    layer = 41_943_040 + 150_994_944 + 8_448
    root = 2 * 151_936 * 4096 + 4096
    parameters = 36 * layer + root
    assert parameters == 8_190_735_360
    parts = chat(QWEN_8B).predict(spec_on(8, exchange="pass"))
    assert parts.update["weights"] == parts.update["gradients"] == parameters * 4 // 8
    assert parts.update["optimizer"] == parameters * 8 // 8
    assert parts.update[GATHERED_BLOCKS] == 2 * (root + 2 * layer)
    assert parts.update[EXCHANGE_BUFFERS] == (2 + 4) * layer
    assert parts.rollout[ROLLOUT_COPY] == 2 * parameters
    assert parts.rollout["KV cache"] == 2 * 36 * 1024 * (4 * 512 + 32 * 2048) * 2
    uncut = chat(QWEN_8B).predict(spec_on(8, exchange="update"))
    assert uncut.update["gradients"] == parameters * 4
    by_blocks = chat(QWEN_8B).predict(spec_on(8, rollout="blocks"))
    assert by_blocks.rollout[GATHERED_BLOCKS] == 2 * (root + 3 * layer)


def test_an_8b_model_fits_eight_cards_only_sharded():
    assert not make_plan(chat(QWEN_8B), spec_on(8, shard=False), 80 * GIB).fits
    plan = make_plan(chat(QWEN_8B), spec_on(8), 80 * GIB)
    assert all(setting.fits for setting in plan.settings.values())
    assert plan.current.spec.sharding == Sharding(8, rollout="whole")
    assert plan.to_dict()["settings"]["current"]["sharding"]["rollout"] == "whole"


@pytest.mark.parametrize(
    ("content", "rows", "too_few", "enough"), [(QWEN_8B, 8, 2, 4), (QWEN_32B, 8, 8, 16), (LLAMA_70B, 4, 16, 32)]
)
def test_the_smallest_number_of_cards_fits_and_the_next_smaller_one_does_not(content, rows, too_few, enough):
    plan = make_plan(chat(content), spec_on(too_few, rows=rows), 80 * GIB)
    assert not plan.fits
    assert plan.fewest_ranks is not None
    assert plan.fewest_ranks.shape.ranks == enough
    assert make_plan(chat(content), spec_on(enough, rows=rows), 80 * GIB).fits


def test_more_cards_than_groups_get_a_group_each():
    setting = fewest_ranks(chat(LLAMA_70B), spec_on(2, conditions=2), 80 * GIB)
    assert setting is not None
    assert setting.shape.ranks == setting.shape.conditions_per_step > 2


def test_more_cards_do_not_help_where_one_row_is_too_large():
    assert fewest_ranks(chat(LLAMA_70B), spec_on(8), 8 * GIB) is None


def test_over_a_node_more_nodes_hold_more_copies():
    """16 bytes of each of 8.19 billion parameters, over 8 ranks whatever the number of nodes."""
    node = Sharding(8, over="node")
    on_two = replace(spec_on(16), sharding=node)
    assert chat(QWEN_8B).predict(on_two).update["weights"] == 8_190_735_360 * 4 // 8
    assert node.on_ranks(32) == node
    assert node.on_ranks(4) == Sharding(4, over="node")
    assert Sharding(8).on_ranks(1) is None


def test_the_rollout_is_gathered_where_it_fits_and_goes_block_by_block_where_not():
    chosen = {gib: evaluate_setting(chat(QWEN_8B), spec_on(8), gib * GIB).spec.sharding for gib in (80, 40, 32)}
    assert {gib: sharding.rollout for gib, sharding in chosen.items()} == {80: "whole", 40: "whole", 32: "blocks"}


@given(st.sampled_from([1, 2, 4, 8]), st.integers(20, 400))
def test_auto_shards_exactly_where_a_replica_does_not_fit(ranks, gib):
    model, spec = chat(QWEN_8B), spec_on(ranks, shard=False)
    replica = evaluate_setting(model, spec, gib * GIB)
    assert needs_sharding(model, spec, gib * GIB) == (ranks > 1 and not replica.fits)
    assert needs_sharding(model, spec_on(ranks), gib * GIB) == needs_sharding(model, spec, gib * GIB)


@given(st.sampled_from([None, 16]), st.sampled_from(["whole", "blocks"]), st.booleans(), st.booleans())
def test_more_ranks_never_need_more_on_each(lora_rank, rollout, kl, ema):
    model = chat(QWEN_8B, lora_rank=lora_rank, reference_copies=int(kl))
    specs = [replace(spec_on(ranks, rollout=rollout), has_ema=ema) for ranks in (2, 4, 8, 16)]
    peaks = [model.predict(spec).peak for spec in specs]
    assert peaks == sorted(peaks, reverse=True)


def test_weights_that_do_not_fit_sharded_either_are_refused_with_a_remedy():
    with pytest.raises(UserError, match="more than 2 ranks"):
        make_plan(chat(LLAMA_70B), spec_on(2), 80 * GIB)
    with pytest.raises(UserError, match="--shard full"):
        make_plan(chat(LLAMA_70B), spec_on(8, shard=False), 80 * GIB)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bfloat16"), (4, "bfloat16"), (4, "float32")])
def test_peaks_are_those_of_torchs_allocator(ranks, dtype):
    """Under a process group whose collectives copy nothing of their own, as on an accelerator; gloo's do."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        measured = measure_peaks(getattr(torch, dtype))
    finally:
        dist.destroy_process_group()
    planned, held = _planned_peaks(ranks, dtype)
    assert planned == {name: pytest.approx(peak + held, rel=0.05) for name, peak in measured.items()}


def _planned_peaks(ranks, dtype):
    """Peaks without activations and logits of the rollout; and what is held all the time."""
    model = ChatMemory(architecture(CONFIG), 1, TOKENS, dtype=dtype, shared=False)

    def predict(conditions, **modes):
        shape = StepShape(10**9, conditions, 2, ranks, 1, "spread")
        return model.predict(StepSpec(shape, fused_optimizer=True, sharding=Sharding(ranks, **modes)))

    def gathered(mode):
        parts = predict(ranks, rollout=mode).rollout
        return held + parts[ROLLOUT_COPY if mode == "whole" else GATHERED_BLOCKS]

    cut = predict(ranks, exchange="pass").update
    held = cut["weights"] + cut["optimizer"]
    peaks = {
        "whole": gathered("whole"),
        "blocks": gathered("blocks"),
        "one pass": sum(predict(ranks // 2).update.values()),
        "pass": sum(cut.values()) - cut["gradients"],  # of the pass before, held when the measurement begins
        "step": sum(predict(ranks, exchange="update").update.values()),
    }
    return peaks, held


@pytest.fixture(scope="module")
def measured_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peaks")
    program = [sys.executable, Path(__file__).with_name("shard_peaks.py"), folder, "2", "4"]
    ended = subprocess.run(program, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder, json.loads((folder / "bytes.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", shard_peaks.SETTINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_of_a_rollout_and_an_update_is_within_five_percent_of_the_allocator(measured_steps, ranks, setting):
    folder, by_ranks = measured_steps
    measured = by_ranks[str(ranks)][setting]
    config = shard_peaks.config(folder, **shard_peaks.SETTINGS[setting])
    sharding = Sharding(ranks, rollout=config.shard_rollout, exchange=config.shard_exchange)
    spec = replace(
        config.step_spec(ranks=ranks, fused_optimizer=True), sharding=sharding if config.shard == "full" else None
    )
    planned = config.workload.memory_model().predict(spec)
    assert planned.update["weights"] == measured["weights"]
    assert planned.update["optimizer"] == pytest.approx(measured["optimizer"], rel=1e-4)  # and a count for each tensor
    assert sum(planned.rollout.values()) == pytest.approx(measured["rollout"], rel=0.05)
    assert sum(planned.update.values()) == pytest.approx(measured["update"], rel=0.05)


@pytest.mark.slow
def test_parts_of_a_rank_on_two_real_ranks(tmp_path):
    output = tmp_path / "bytes.json"
    done = on_ranks(2, [Path(__file__).with_name("sharded_llama.py"), output])
    assert done.returncode == 0, done.stderr
    parts = ChatMemory(architecture(CONFIG), 1, TOKENS, dtype="bfloat16").predict(
        StepSpec(StepShape(10**9, 1, 2, 2, 1, "spread"), sharding=Sharding(2, exchange="pass"))
    )
    measured = json.loads(output.read_text())
    assert measured["gradients"] == measured["weights"]
    assert {name: parts.update[name] for name in ("weights", "optimizer")} == {
        name: measured[name] for name in ("weights", "optimizer")
    }
