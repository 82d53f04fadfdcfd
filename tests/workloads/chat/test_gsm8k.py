"""The recipe chat-gsm8k on a few lines in GSM8K's format and a tiny model saved on the spot, from the command line."""

import json
import time

import pytest
from processes import start
from tiny.chat import write_lines
from tiny.llama import save_model

from groupwise.cli.main import main
from groupwise.core.io.files import read_jsonl

LINES = [
    {
        "question": f"Tom has {number} apples and buys {number + 1} more. How many does he have?",
        "answer": f"Tom has {number} + {number + 1} = <<{number}+{number + 1}={2 * number + 1}>>{2 * number + 1}"
        f" apples.\n#### {2 * number + 1}",
    }
    for number in range(1, 600, 75)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    save_model(folder / "model", positions=512)
    write_lines(folder / "train.jsonl", LINES)
    write_lines(folder / "test.jsonl", LINES[:3])
    return folder


def flags(files, **others):
    settings = {
        "workload.policy.model": files / "model",
        "workload.data.train": files / "train.jsonl",
        "workload.data.held-out": files / "test.jsonl",
        "workload.sampling.max-new-tokens": 8,
        "conditions-per-step": 4,
        "group-size": 4,
        "rows-per-pass": 4,
        "steps": 1,
        **others,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def test_it_trains_and_is_evaluated(files, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "chat-gsm8k", *flags(files, **{"run-dir": run})]) == 0
    (metrics,) = read_jsonl(run / "metrics.jsonl")
    assert metrics["reward/numeric"] == 0  # a random model
    assert metrics["truncated_fraction"] > 0
    sample = read_jsonl(run / "samples.jsonl")[0]
    assert "four hash signs" in sample["prompt"]
    assert "Tom has" in sample["prompt"]
    assert sample["answer"].startswith("Tom has")
    assert "Samples of step 0" in capsys.readouterr().err
    assert main(["eval", str(run)]) == 0
    output = capsys.readouterr().out
    assert "pass@k on 3 held-out prompts" in output
    assert "base" in output
    report = json.loads((run / "eval.json").read_text())["report"]
    assert report["policies"]["trained"]["pass_at"]["8"]["mean"] == 0
    assert (run / "eval.png").stat().st_size > 5000


def test_a_broken_line_ends_with_code_2_and_its_number(files, tmp_path, capsys):
    broken = write_lines(tmp_path / "broken.jsonl", [LINES[0], '{"question": "cut sh'])
    assert main(["check", "chat-gsm8k", *flags(files, **{"workload.data.train": broken})]) == 2
    assert "broken.jsonl, line 2: it is not JSON" in " ".join(capsys.readouterr().err.split())


def test_killed_at_any_moment_and_resumed_it_ends_bit_identical(files, tmp_path):
    def command(run):
        others = {"run-dir": tmp_path / run, "steps": 5, "checkpoint-every": 1, "workload.data.held-out": ""}
        return ["train", "chat-gsm8k", *flags(files, **others), "--no-preflight", "--resume"]

    killed = start(*command("killed"))
    while not list((tmp_path / "killed" / "checkpoints").glob("step-*")):
        assert killed.poll() is None, killed.communicate()[1][-3000:]
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    assert main(command("killed")) == 0
    assert main(command("straight")) == 0
    for name in ("policy.safetensors", "optimizer.safetensors"):
        straight, resumed = (
            (tmp_path / run / "checkpoints" / "step-000005" / name).read_bytes() for run in ("straight", "killed")
        )
        assert straight == resumed
