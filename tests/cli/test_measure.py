"""`groupwise measure` on the embedded model and on folders of tiny ones."""

import json

import pytest
import torch
from tiny.busy import busy_machine
from tiny.llava import llava_olmoe
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from groupwise.cli.main import main
from groupwise.workloads.controller.tasks.mosaic.model import mosaic_options

DENSE = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    bos_token_id=None,
    eos_token_id=7,
)


def run(capsys, *arguments):
    """Exit code, stdout and stderr of one command in this process."""
    capsys.readouterr()
    code = main(["measure", *(str(argument) for argument in arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(autouse=True)
def one_thread_and_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(1)


def test_mosaic_by_tier_depth_and_top_k(capsys, tmp_path):
    code, out, err = run(capsys, "mosaic", "--runs", 1, "--warm-up", 0, "--new-tokens", 2, "--json")
    assert code == 0, err
    printed, options = json.loads(out), mosaic_options()
    settings = {(row["tier"], row["blocks"], row["top_k"]) for row in printed["measured"]}
    by_depth = {(tier, blocks, options.full_top_k) for tier in options.crops_by_tier for blocks in options.block_totals}
    by_top_k = {(tier, options.total_blocks, top_k) for tier in options.crops_by_tier for top_k in options.top_ks}
    assert settings == by_depth | by_top_k
    assert len(printed["measured"]) == len(settings)
    for row in printed["measured"]:
        parts = [row[stage]["p50_ms"] for stage in ("vision", "prefill", "decode")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(row["total"]["p50_ms"])  # of one run, the medians are that run
    assert (printed["runs"], printed["warm_up"], printed["new_tokens"], printed["threads"]) == (1, 0, 2, 1)
    assert printed["picture"] == "measure-mosaic.png"
    assert (tmp_path / "measure-mosaic.png").read_bytes().startswith(b"\x89PNG")


def test_a_local_model_is_drawn_and_explained(capsys, tmp_path):
    llava_olmoe().save_pretrained(tmp_path / "tiny")
    arguments = ("tiny", "--runs", 1, "--warm-up", 1, "--new-tokens", 2, "--plot", "drawn.svg")
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    assert "milliseconds of one answer, measured" in out
    assert "1 thread, torch" in out
    assert "1 run of each setting after 1 of warm-up" in out
    assert "By tier and depth, top-k 4" in out
    assert "By tier and top-k, 8 blocks" in out
    # Three tiers with 6 to 8 blocks, and with top-k 2 to 4.
    lines = [line.split() for line in out.splitlines()]
    metrics = [line for line in lines if line and line[-1].replace(".", "").isdigit() and len(line) >= 8]
    assert len(metrics) == 3 * 3 + 3 * 3
    assert "15 settings x 2 answers of tiny 30/30" in err
    drawn = (tmp_path / "drawn.svg").read_text()
    for word in ("tiny: one answer, measured", "milliseconds (p50)", "vision", "prefill", "decode", "blocks", "top-k"):
        assert f"<!-- {word} -->" in drawn


def test_a_busy_machine_is_noted_unless_cpu_time_is_measured(capsys):
    llava_olmoe().save_pretrained("tiny")
    with busy_machine():
        notes = [
            json.loads(run(capsys, "tiny", "--runs", 4, "--warm-up", 0, "--clock", clock, "--json")[1])["notes"]
            for clock in ("wall", "cpu")
        ]
    assert [any("The machine was busy: answers had the CPU for" in note for note in each) for each in notes] == [
        True,
        False,
    ]


def test_a_dense_model_has_no_top_k_and_a_text_model_no_tiers(capsys, tmp_path):
    config = LlavaConfig(**(llava_olmoe().config.to_dict() | {"text_config": DENSE.to_dict()}))
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "dense")
    code, out, err = run(capsys, "dense", "--runs", 1, "--warm-up", 0)
    assert code == 0, err
    assert "By tier and depth" in out
    assert "By tier and top-k" not in out
    LlamaForCausalLM(DENSE).save_pretrained(tmp_path / "text")
    code, out, err = run(capsys, "text", "--runs", 1, "--warm-up", 0, "--new-tokens", 3, "--json")
    assert code == 0, err
    (row,) = json.loads(out)["measured"]
    assert (row["tier"], row["blocks"]) == ("text", 3)
    assert row["vision"]["p50_ms"] == 0
    assert row["decode"]["p50_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["nowhere"], "There is no model 'nowhere'"),
        (["mosaic", "--runs", "0"], "runs is 0: it must be 1 or more"),
        (["mosaic", "--warm-up", "-1"], "warm_up is -1"),
        (["mosaic", "--new-tokens", "0"], "new_tokens is 0"),
        (["mosaic", "--threads", "0"], "threads is 0"),
        (["mosaic", "--threads", "2", "--clock", "cpu"], "threads is 2: it must be 1 with --clock cpu"),
        (["mosaic", "--plot", "picture.doc"], "plot is picture.doc"),
        (["mosaic", "--plot", "nowhere/picture.png"], "in a folder that exists"),
        (["empty"], "The model 'empty' cannot be loaded"),
        (["broken"], "broken/config.json is damaged"),
        (["cut"], "The model 'cut' cannot be loaded"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(capsys, tmp_path, arguments, says):
    for name, config in (("empty", DENSE.to_json_string()), ("broken", "{"), ("cut", DENSE.to_json_string())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x00" * 5)
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 2
    assert says in json.loads(out)["error"]
    assert "\n" not in json.loads(out)["error"]
    assert "Traceback" not in err
