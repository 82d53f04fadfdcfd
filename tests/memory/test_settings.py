"""Proposals fit and divide; what to lower first lowers; bad numbers are refused."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import ENVIRONMENT

from groupwise.core.errors import UserError
from groupwise.core.shape import StepShape
from groupwise.core.units import format_bytes, parse_bytes
from groupwise.memory.architecture import architecture
from groupwise.memory.plan import AGGRESSIVE, RECOMMENDED, make_plan, reduction_steps
from groupwise.memory.stages import MARGIN_BYTES, StageBytes, StepSpec, WeightBytes, peak_of_update
from groupwise.workloads.chat.memory import ChatMemory

GIB = 1 << 30
MODEL = architecture(
    {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000}
)


def job(rows=8, group=16, conditions=32, ranks=8, kind="whole", **more):
    return StepSpec(StepShape(10**9, conditions, group, ranks, rows, kind), **more)


@given(
    st.sampled_from([4, 6, 8, 16]),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["whole", "spread", "shuffled"]),
    st.integers(8, 80),
)
def test_proposals_divide_and_stay_below_their_share(group, conditions, ranks, kind, gib):
    plan = make_plan(ChatMemory(MODEL, 256, 256), job(1, group, conditions, ranks, kind), gib * GIB)
    for found, share in ((plan.recommended, RECOMMENDED), (plan.aggressive, AGGRESSIVE)):
        shape = found.shape
        StepShape(10**9, shape.conditions_per_step, group, ranks, shape.rows_per_pass, kind)  # or it would be refused
        assert found.utilization <= share or shape.rows_per_pass == 1
    assert plan.aggressive.shape.rows_per_pass >= plan.recommended.shape.rows_per_pass


@given(st.sampled_from([1, 2, 4, 8, 16]), st.booleans(), st.sampled_from([None, 8]))
def test_each_lowering_saves_what_it_says(rows, checkpointing, rank):
    model = ChatMemory(MODEL, 256, 256, checkpointing=checkpointing, lora_rank=rank)
    plan = make_plan(model, job(rows), 64 * GIB)
    peak = plan.current.stages.peak
    for step in plan.lower:
        assert step.saves > 0
        assert step.peak == peak - step.saves or step.peak < peak
        peak = step.peak
    kinds = [step.changes_result for step in plan.lower]
    assert kinds == sorted(kinds), "what changes the result comes last"


def test_what_saves_nothing_by_itself_is_named_with_what_builds_on_it():
    """The update is the peak until it is checkpointed; then the rollout would be, but for fewer decoded rows."""

    def stages(rollout, update):
        return lambda job: StageBytes({"all": rollout}, {"all": update})

    steps = [("decode_rows 8 -> 4", stages(60, 100), False), ("decode_rows 4 -> 2", stages(30, 100), False)]
    steps += [("checkpointing on", stages(30, 40), False)]
    (found,) = reduction_steps(job(rows=1), stages(90, 100), steps)
    assert found.what == "checkpointing on; with decode_rows 2"
    assert found.saves == pytest.approx(60, abs=4)  # and the margin's share of it


def test_loops_hardly_change_the_peak_and_rows_do():
    model = ChatMemory(MODEL, 256, 256)
    plan = make_plan(model, job(), 64 * GIB)
    for peak in plan.doubled.values():
        assert peak == pytest.approx(plan.current.stages.peak, rel=0.01)
    more = model.stages(job(rows=16)).peak
    assert more > 1.2 * model.stages(job(rows=8)).peak


def test_the_parts_by_hand():
    # 10 frozen numbers of 2 bytes, 5 trained of 4, on 2 ranks that share them
    alone, shared = (WeightBytes(10, 5, 2, 4).parts(job(sharded=on, ranks=2, ema=True)) for on in (False, True))
    assert alone == {"weights": 40, "gradients": 20, "optimizer": 40, "averaged weights": 20, "reference": 0}
    assert shared == {"weights": 20, "gradients": 10, "optimizer": 20, "averaged weights": 10, "reference": 0}
    stages = StageBytes({"a": 100}, {"a": 60, "b": 60})
    assert (stages.peak, stages.fullest) == (120, "update")
    assert stages.with_margin().peak == 120 + 6 + MARGIN_BYTES


def test_gradients_that_come_while_activations_go_are_not_added():
    held = {"weights": 5, "gradients": 30}
    assert peak_of_update(held, [{"activations": 50}], 1, one_pass=True) == {
        "weights": 5,
        "gradients": 0,
        "activations": 50,
    }
    assert peak_of_update(held, [{"activations": 50}], 1, one_pass=False)["gradients"] == 30
    assert peak_of_update(held, [{"activations": 3}], 9, one_pass=False) == held | {"optimizer's results": 9}


def test_a_device_below_the_weights_is_refused():
    with pytest.raises(UserError, match=r"--device-memory is 256\.0 MiB, and the weights alone take"):
        make_plan(ChatMemory(MODEL, 256, 256), job(), 256 << 20)


@pytest.mark.parametrize(
    ("text", "size"), [("32GiB", 32 << 30), ("80 GB", 80 * 10**9), ("1.5gib", 3 << 29), ("512", 512), ("1TB", 10**12)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["32 gigs", "GiB", "-3GiB", "", "0GiB", "1e3GiB"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(UserError, match=r"--device-memory is '.*': it must be"):
        parse_bytes(text, "--device-memory")


@given(st.integers(1, 2**50))
def test_what_is_written_is_read_back_roughly(size):
    assert parse_bytes(format_bytes(size).replace(" ", "")) == pytest.approx(size, rel=0.06)


def test_the_planner_does_not_import_torch():
    words = (
        "import sys, groupwise.plan.plan, groupwise.plan.language, groupwise.plan.video, groupwise.plan.frozen;"
        "from groupwise.recipes import load_recipe;"
        "[load_recipe(name).workload.memory_model() for name in ('chat', 'controller')];"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", words], env=ENVIRONMENT, check=True, timeout=60)


def test_numbers_below_one_are_refused():
    with pytest.raises(UserError, match="prompt_tokens is 0"):
        ChatMemory(MODEL, 0, 1)
    with pytest.raises(UserError, match="decode_rows is 0"):
        replace(ChatMemory(MODEL, 1, 1), decode_rows=0)
