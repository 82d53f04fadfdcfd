"""Proposals fit their share; each reduction saves what it says; bad numbers are refused."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import ENVIRONMENT

from groupwise.core.errors import UserError
from groupwise.core.shape import StepShape
from groupwise.memory.architecture import architecture
from groupwise.memory.plan import AGGRESSIVE, RECOMMENDED, Reduction, make_plan, reduction_steps
from groupwise.memory.stages import StageBytes, StepSpec
from groupwise.workloads.chat.memory import ChatMemory

GIB = 1 << 30
MODEL = architecture(
    {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000}
)


def make_spec(rows=8, group=16, conditions=32, ranks=8, placement="whole", **fields):
    return StepSpec(StepShape(10**9, conditions, group, ranks, rows, placement), **fields)


@given(
    st.sampled_from([4, 6, 8, 16]),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["whole", "spread", "shuffled"]),
    st.integers(8, 80),
)
def test_proposals_stay_below_their_share_in_passes_of_equal_size(group, conditions, ranks, placement, gib):
    plan = make_plan(ChatMemory(MODEL, 256, 256), make_spec(1, group, conditions, ranks, placement), gib * GIB)
    for setting, share in ((plan.recommended, RECOMMENDED), (plan.aggressive, AGGRESSIVE)):
        shape = setting.shape
        assert setting.utilization <= share or shape.rows_per_pass == 1
        assert shape.rows_per_pass == -(-shape.rollouts_per_rank // shape.passes), "no pass needs so many rows"
    assert plan.aggressive.shape.rows_per_pass >= plan.recommended.shape.rows_per_pass


@given(st.sampled_from([1, 2, 4, 8, 16]), st.booleans(), st.sampled_from([None, 8]))
def test_each_reduction_saves_what_it_says(rows, checkpointing, rank):
    model = ChatMemory(MODEL, 256, 256, checkpointing=checkpointing, lora_rank=rank)
    plan = make_plan(model, make_spec(rows), 64 * GIB)
    peak = plan.current.stages.peak
    for step in plan.reductions:
        assert step.saved_bytes > 0
        assert step.peak_bytes == peak - step.saved_bytes or step.peak_bytes < peak
        peak = step.peak_bytes
    changes = [step.changes_result for step in plan.reductions]
    assert changes == sorted(changes), "what changes the result comes last"


@dataclass(frozen=True)
class FixedMemory:
    rollout: int
    update: int
    then: tuple[Reduction, ...] = ()

    def predict(self, spec):
        return StageBytes({"all": self.rollout}, {"all": self.update})

    def reductions(self):
        return self.then


def test_what_saves_nothing_by_itself_is_named_with_what_builds_on_it():
    """The update is the peak until it is checkpointed; then the rollout would be, but for fewer decoded rows."""
    reductions = (
        Reduction("decode_rows", 4, FixedMemory(60, 100), previous=8),
        Reduction("decode_rows", 2, FixedMemory(30, 100), previous=4),
        Reduction("checkpointing", "on", FixedMemory(30, 40)),
    )
    (step,) = reduction_steps(FixedMemory(90, 100, reductions), make_spec(rows=1))
    assert step.description == "checkpointing on; with decode_rows 2"
    assert step.saved_bytes == pytest.approx(60, abs=4)  # and the margin's share of it


def test_a_reduction_describes_itself():
    memory = FixedMemory(1, 1)
    assert Reduction("decode_rows", 4, memory, previous=8).description == "decode_rows 8 -> 4"
    assert Reduction("lora_rank", 32, memory, effect="an adapter").description == "lora_rank 32 (an adapter)"


def test_rows_that_a_rank_does_not_have_are_not_counted():
    # 32 x 16 rollouts on 8 ranks: 64 rows each
    model = ChatMemory(MODEL, 256, 256)
    most, more = model.predict(make_spec(rows=64)), model.predict(make_spec(rows=1000))
    assert most == more
    assert make_plan(model, make_spec(rows=1000), 64 * GIB).reductions[0].description == "rows_per_pass 64 -> 32"


def test_loops_hardly_change_the_peak_and_rows_do():
    model = ChatMemory(MODEL, 256, 256)
    plan = make_plan(model, make_spec(), 64 * GIB)
    for peak in plan.peak_if_doubled.values():
        assert peak == pytest.approx(plan.current.stages.peak, rel=0.01)
    assert model.predict(make_spec(rows=16)).peak > 1.2 * model.predict(make_spec(rows=8)).peak


def test_a_device_below_the_weights_is_refused():
    with pytest.raises(UserError, match=r"--device-memory is 256\.0 MiB, and the weights alone take"):
        make_plan(ChatMemory(MODEL, 256, 256), make_spec(), 256 << 20)


def test_planning_does_not_import_torch():
    code = (
        "import sys\n"
        "import groupwise.memory.stages, groupwise.memory.plan, groupwise.memory.architecture, groupwise.cli.plan\n"
        "from groupwise.recipes import load_recipe\n"
        "for workload in ('chat', 'controller', 'flow'):\n"
        "    for module in ('config', 'memory'):\n"
        "        __import__(f'groupwise.workloads.{workload}.{module}')\n"
        "    config = load_recipe(workload)\n"
        "    config.workload.memory_model().predict(config.step_spec())\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, timeout=60)


def test_numbers_below_one_are_refused():
    with pytest.raises(UserError, match="prompt_tokens is 0"):
        ChatMemory(MODEL, 0, 1)
    with pytest.raises(UserError, match="decode_rows is 0"):
        replace(ChatMemory(MODEL, 1, 1), decode_rows=0)
