import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fakes import TinyConfig, recipe

import groupwise as gw
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_jsonl
from groupwise.dist.trackers import Trackers
from groupwise.training.config import differing_fields, from_dict, memory_settings, to_dict
from groupwise.training.evaluate import evaluate, held_out_metrics
from groupwise.training.run import set_up
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.run_folder.folder import RunFolder
from groupwise.workloads.checkpoint_files import read_metadata

TIMES = ("rollout_s", "reward_s", "update_s", "memory_bytes")


def config_in(folder, **changes):
    run = replace(recipe().run, run_dir=folder, **changes.pop("run", {}))
    return replace(recipe(), run=run, **changes)


def steps_of(folder):
    """metrics.jsonl without what depends on the clock."""
    return [
        {name: value for name, value in entry.items() if name not in TIMES}
        for entry in read_jsonl(folder / "metrics.jsonl")
    ]


def files_of(folder, step):
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    return {
        name: (checkpoint / name).read_bytes()
        for name in ("policy.safetensors", "optimizer.safetensors", "ema.safetensors")
    }


def test_a_run_leaves_its_folder_and_learns(tmp_path):
    summary = gw.train(config_in(tmp_path / "a", steps=80))
    assert summary.reward_last_tenth.mean > summary.reward_first_tenth.mean + 0.1
    assert summary.eval_after["right"] > summary.eval_before["right"] + 0.1
    metrics = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert [entry["step"] for entry in metrics] == list(range(80))
    assert {"reward", "reward/share", "zero_spread_share", "kl", "entropy", "grad_norm"} <= set(metrics[0])
    samples = read_jsonl(tmp_path / "a" / "samples.jsonl")
    assert [(s["step"], s["member"]) for s in samples[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert samples[0]["rewards"] == {"share": samples[0]["reward"]}
    names = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    assert names == ["step-000076", "step-000078", "step-000080"]
    versions = read_metadata(tmp_path / "a" / "checkpoints" / "step-000080")["versions"]
    assert {"groupwise", "torch", "accelerate", "python"} == set(versions)


def test_the_summary_compares_the_first_and_the_last_tenth_of_all_steps(tmp_path):
    for steps in (12, 24):  # the second time resumed: the earlier steps count too
        summary = gw.train(config_in(tmp_path / "a", steps=steps, run={"resume": True}))
        rewards = [entry["reward"] for entry in read_jsonl(tmp_path / "a" / "metrics.jsonl")]
        tenth = {12: 1, 24: 2}[steps]
        for shown, values in (
            (summary.reward_first_tenth, rewards[:tenth]),
            (summary.reward_last_tenth, rewards[-tenth:]),
        ):
            assert shown.mean == pytest.approx(sum(values) / tenth)
            assert shown.std == pytest.approx(abs(values[0] - values[-1]) / 2)  # of one number 0, of two half the gap


def test_stopped_and_resumed_is_the_run_that_was_never_stopped(tmp_path):
    gw.train(config_in(tmp_path / "whole"))
    gw.train(config_in(tmp_path / "halves"))
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-000006")
    shutil.rmtree(tmp_path / "halves" / "checkpoints" / "step-000004")
    with (tmp_path / "halves" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # cut short by a crash
    summary = gw.train(config_in(tmp_path / "halves", run={"resume": True}))
    assert summary.steps == 6
    assert steps_of(tmp_path / "halves") == steps_of(tmp_path / "whole")
    assert files_of(tmp_path / "halves", 6) == files_of(tmp_path / "whole", 6)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "meta"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage, capsys):
    gw.train(config_in(tmp_path / "a"))
    whole = files_of(tmp_path / "a", 6)
    newest = tmp_path / "a" / "checkpoints" / "step-000006"
    target = newest / ("checkpoint.json" if damage == "meta" else "optimizer.safetensors")
    raw = bytearray(target.read_bytes())
    raw[len(raw) // 2] ^= 1
    if damage == "missing":
        target.unlink()
    else:
        target.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:-9]), "meta": b"{"}[damage])
    capsys.readouterr()
    gw.train(config_in(tmp_path / "a", run={"resume": True}))
    stderr = capsys.readouterr().err
    assert "step-000006 is damaged" in stderr
    assert "after step 4" in stderr
    assert files_of(tmp_path / "a", 6) == whole


def test_resume_under_other_settings_names_the_fields(tmp_path):
    gw.train(config_in(tmp_path / "a"))
    other = config_in(tmp_path / "a", seed=7, loss=gw.LossConfig(kl=0.5, entropy=0.01), run={"resume": True})
    with pytest.raises(UserError, match=r"loss\.kl was 0\.05 and is now 0\.5; seed was 0 and is now 7"):
        gw.train(other)


def test_rows_per_pass_and_steps_may_change_on_resume(tmp_path):
    gw.train(config_in(tmp_path / "a"))
    summary = gw.train(config_in(tmp_path / "a", steps=8, rows_per_pass=2, run={"resume": True}))
    assert summary.steps == 8
    assert [entry["step"] for entry in steps_of(tmp_path / "a")] == list(range(8))


def test_a_folder_with_another_run_and_one_in_use_are_refused(tmp_path):
    gw.train(config_in(tmp_path / "a"))
    with pytest.raises(UserError, match=r"already holds a run \(6 steps\).*--resume"):
        gw.train(config_in(tmp_path / "a"))
    with pytest.raises(UserError, match="already holds a run"):  # before anything large is loaded
        gw.train(config_in(tmp_path / "a", workload=gw.WorkloadConfig()))
    holder = RunFolder(tmp_path / "a")
    holder.lock(resume=True)
    with pytest.raises(UserError, match="Another process is training"):
        gw.train(config_in(tmp_path / "a", run={"resume": True}))
    holder.release()
    holder.release()  # harmless
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        gw.train(config_in(tmp_path / "file" / "a"))
    with pytest.raises(UserError, match="The run folder /proc/self cannot be written"):  # where no file can be made
        gw.train(config_in(Path("/proc/self")))


def test_a_failing_reward_stops_the_run_and_loses_nothing(tmp_path):
    config = config_in(tmp_path / "a", run={"checkpoint_every": 100})
    built = type(config.workload).build

    class FailsLate(TinyConfig):
        def build(self, device):
            workload = built(self, device)
            judge, calls = workload.rewards, []

            def rewards(rollouts):
                calls.append(1)
                terms = judge(rollouts)
                if len(calls) <= 4:  # preflight looks at them once
                    return terms
                return gw.RewardTerms(
                    {"share": terms.per_rollout["share"] * float("nan")}, {"share": "raised OSError: judge down"}
                )

            workload.rewards = rewards
            return workload

    with pytest.raises(UserError, match=r"32 of 32 rollouts.*judge down"):
        gw.train(replace(config, workload=FailsLate()))
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-000003"]
    gw.train(replace(config, run=replace(config.run, resume=True)))
    gw.train(config_in(tmp_path / "b"))
    assert steps_of(tmp_path / "a") == steps_of(tmp_path / "b")


def test_missing_rewards_are_counted_not_zero(tmp_path):
    config = config_in(
        tmp_path / "a", workload=TinyConfig(missing_member=1), reward=gw.RewardConfig(max_missing_fraction=0.3)
    )
    gw.train(config)
    for entry in steps_of(tmp_path / "a"):
        assert entry["missing_rewards"] == 8
        assert entry["reward/share/missing_fraction"] == 0.25
        assert entry["trained_rollouts"] <= 24
    missing = [s for s in read_jsonl(tmp_path / "a" / "samples.jsonl") if s["member"] == 1]
    assert all(s["reward"] is None and s["advantage"] == 0 for s in missing)


def test_tensorboard_receives_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    gw.train(config_in(tmp_path / "a", run={"trackers": ("tensorboard",)}))
    board = EventAccumulator(str(tmp_path / "a" / "groupwise"))
    board.Reload()
    assert [scalar.value for scalar in board.Scalars("reward")] == pytest.approx(
        [entry["reward"] for entry in steps_of(tmp_path / "a")]
    )


def test_tensorboard_shows_the_images_of_evaluations(tmp_path):
    from io import BytesIO

    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(("tensorboard",), tmp_path, {})
    Image.new("RGB", (3, 2), (255, 0, 9)).save(tmp_path / "clips.png")
    trackers.log_images({"clips": tmp_path / "clips.png", "moving": tmp_path / "clips.gif"}, step=7)
    trackers.close()
    board = EventAccumulator(str(tmp_path / "groupwise"))
    board.Reload()
    assert board.Tags()["images"] == ["clips"]
    (shown,) = board.Images("clips")
    assert shown.step == 7
    assert Image.open(BytesIO(shown.encoded_image_string)).getpixel((2, 1)) == (255, 0, 9)


def test_evaluation_uses_the_average_and_runs_every_few_steps(tmp_path):
    config = config_in(tmp_path / "a", run={"eval_every": 3})
    gw.train(config)
    evaluation = json.loads((tmp_path / "a" / "eval.json").read_text())
    assert list(evaluation) == ["before", "step 3", "step 6", "after"]
    setup = set_up(config)
    restore(tmp_path / "a" / "checkpoints" / "step-000006", setup.state)
    assert evaluation["after"] == held_out_metrics(setup)
    assert any(
        (weight - setup.state.ema.weights[name]).abs().max() > 1e-3
        for name, weight in setup.workload.policy.named_parameters()
    )


def test_the_configured_advantage_is_the_one_that_trains(tmp_path):
    samples = {}
    for kind in ("centered", "leave_one_out"):
        gw.train(
            config_in(tmp_path / kind, steps=1, advantage=gw.AdvantageConfig(kind=kind), run={"samples_per_step": 32})
        )
        samples[kind] = [entry["advantage"] for entry in read_jsonl(tmp_path / kind / "samples.jsonl")]
    assert samples["leave_one_out"] == pytest.approx([4 / 3 * value for value in samples["centered"]])
    assert any(samples["centered"])


def test_torchs_own_generator_depends_on_seed_and_step_alone(tmp_path):
    drawn = {}
    built = TinyConfig.build
    for name, steps in (("long", 4), ("short", 2)):

        def build(self, device, name=name):
            workload = built(self, device)
            act = workload.rollout
            workload.rollout = lambda rows: drawn.setdefault((name, rows.step), torch.rand(3).tolist()) and act(rows)
            return workload

        listening = type("Listening", (TinyConfig,), {"build": build})
        gw.train(config_in(tmp_path / name, steps=steps, workload=listening(), run={"preflight": name == "long"}))
    assert drawn["long", 1] == drawn["short", 1]
    assert drawn["long", 1] != drawn["long", 2]


def test_weights_that_are_no_longer_finite_stop_the_run(tmp_path):
    built = TinyConfig.build

    class Huge(TinyConfig):
        def build(self, device):
            workload = built(self, device)
            workload.policy.register_parameter("spare", torch.nn.Parameter(torch.tensor([3e38])))
            return workload

    config = config_in(tmp_path / "a", workload=Huge(dtype="float32"), run={"preflight": False})
    decaying = replace(config.optimizer, learning_rate=900.0, weight_decay=900.0, schedule="constant")
    with pytest.raises(UserError, match="made weights that are not finite"):
        gw.train(replace(config, optimizer=decaying))
    assert not list((tmp_path / "a").glob("checkpoints/step-*"))


def test_a_crash_in_users_code_saves_what_was_done_and_keeps_the_traceback(tmp_path):
    built = TinyConfig.build

    class Crashes(TinyConfig):
        def build(self, device):
            workload = built(self, device)
            score, calls = workload.score, []

            def crash_late(part):
                calls.append(1)
                if len(calls) > 20:
                    raise KeyError("cond2")
                return score(part)

            workload.score = crash_late
            return workload

    config = config_in(tmp_path / "a", workload=Crashes(), run={"checkpoint_every": 100})
    config = replace(config, optimizer=replace(config.optimizer, updates_per_step=1))
    with pytest.raises(UserError, match=r"score\(\) of TinyWorkload raised KeyError: 'cond2' \(.*test_run.py:\d+\)"):
        gw.train(config)
    (checkpoint,) = (tmp_path / "a" / "checkpoints").glob("step-*")
    assert int(checkpoint.name[5:]) == len(read_jsonl(tmp_path / "a" / "metrics.jsonl")) > 0
    assert "crash_late" in (tmp_path / "a" / "error.txt").read_text()


def test_configs_survive_json():
    config = replace(recipe(), reward=gw.RewardConfig(weights={"share": 2.0}), run=gw.RunConfig(trackers=("wandb",)))
    plain = json.loads(json.dumps(to_dict(config)))
    assert from_dict(recipe(), plain) == config
    assert differing_fields(to_dict(config), plain) == []


@dataclass(frozen=True)
class WithOddFields(TinyConfig):
    reward: Callable[..., float] = len
    data: Path = Path("/a")
    cache: Path | None = None


def test_functions_and_paths_in_a_config_survive_too():
    config = replace(recipe(), workload=WithOddFields(data=Path("/b"), cache=Path("/c")))
    plain = json.loads(json.dumps(to_dict(config)))
    assert plain["workload"]["reward"] == "builtins:len"
    assert from_dict(replace(recipe(), workload=WithOddFields()), plain) == config


@dataclass(frozen=True)
class Measures(TinyConfig):
    """Measures something when it is built, each time with another result, unless the result is given."""

    measured: str = ""

    def build(self, device):
        workload, measured = super().build(device), self.measured or json.dumps({"measured": time.perf_counter()})
        workload.checkpoint_files = lambda: {"measured.json": measured.encode()}
        return workload

    def for_resume(self, checkpoint):
        return replace(self, measured=(checkpoint / "measured.json").read_text())


def test_what_a_workload_would_measure_again_is_read_from_the_checkpoint(tmp_path):
    first = config_in(tmp_path / "a", steps=2, workload=Measures())
    gw.train(first)
    evaluate(first, RunFolder(tmp_path / "a"), pytest.fail)
    gw.train(config_in(tmp_path / "a", steps=4, workload=Measures(), run={"resume": True}))
    two, four = (tmp_path / "a" / "checkpoints" / f"step-00000{step}" / "measured.json" for step in (2, 4))
    assert two.read_bytes() == four.read_bytes()


def test_a_run_that_ends_before_its_first_checkpoint_keeps_what_its_workload_measured(tmp_path):
    gw.train(config_in(tmp_path, steps=2, workload=Measures()))
    measured = (tmp_path / "start" / "measured.json").read_bytes()
    assert measured == (tmp_path / "checkpoints" / "step-000002" / "measured.json").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")  # as if it had been killed before
    gw.train(config_in(tmp_path, steps=2, workload=Measures(), run={"resume": True}))
    assert (tmp_path / "checkpoints" / "step-000002" / "measured.json").read_bytes() == measured
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.move(tmp_path / "start", tmp_path / "elsewhere")
    (tmp_path / "start").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"start is a link: it must be a folder within the run folder"):
        gw.train(config_in(tmp_path, steps=2, workload=Measures(), run={"resume": True}))


def test_a_memory_setting_that_the_user_changes_applies_on_resume():
    """Limits that were halved when memory ran out then no longer apply."""
    plain = to_dict(recipe())
    assert memory_settings(plain) == [4, None, None, None, None]
    assert memory_settings({**plain, "workload": {**plain["workload"], "decode_rows": 8}})[:2] == [4, 8]


@dataclass(frozen=True)
class Slow(TinyConfig):
    def build(self, device):
        raise AssertionError("it was built: minutes, for a real workload")


def test_numbers_that_can_never_fit_are_refused_before_anything_is_built():
    with pytest.raises(UserError, match="rows_per_pass is 0: it must be at least 1"):
        set_up(replace(recipe(), workload=Slow(), rows_per_pass=0))
    with pytest.raises(Exception, match="it was built"):
        set_up(replace(recipe(), workload=Slow()))
