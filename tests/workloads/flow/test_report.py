"""What people see of a flow run."""

from dataclasses import replace

from groupwise.workloads.flow.workload import FlowWorkload
from workloads.flow.small import CPU, SmallConfig


def reporter_of(**task):
    config = SmallConfig()
    return FlowWorkload(replace(config.task(CPU), **task), config, CPU).reporter


def draw(conditions, clips):
    return lambda path: path.write_text(f"{[condition.name for condition in conditions]} {tuple(clips.shape)}")


def test_images_show_the_first_held_out_clips(tmp_path):
    (name, write), *rest = reporter_of(images={"clips.png": draw}, num_images=2).images().items()
    assert (name, rest) == ("clips.png", [])
    write(tmp_path / name)
    assert (tmp_path / name).read_text() == "['clip 100', 'clip 101'] (2, 3, 5, 8, 8)"


def test_without_held_out_conditions_images_show_the_first_of_training(tmp_path):
    reporter_of(images={"clips.png": draw}, held_out=[], num_images=1).images()["clips.png"](tmp_path / "clips.png")
    assert (tmp_path / "clips.png").read_text() == "['clip 0'] (1, 3, 5, 8, 8)"


def test_preflight_notes_count_the_trained_parameters():
    (count, note) = reporter_of(notes=["a note"]).preflight_notes()
    total = sum(weight.numel() for weight in SmallConfig().build(CPU).policy.parameters())
    assert count == f"{total:,} of the transformer's {total:,} parameters are trained"
    assert note == "a note"
