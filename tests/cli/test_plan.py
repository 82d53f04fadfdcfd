"""`groupwise plan`: one object, three settings, a picture, and exit code 2 for what cannot be."""

import json
import re

import pytest

from groupwise.cli.main import main

CONFIG = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
CONFIG |= {"num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256}
CONFIG |= {"tie_word_embeddings": True}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_json_holds_parts_peak_settings_and_whether_it_fits(config, capsys):
    assert main(["plan", config, "--device-memory", "80GiB", "--ranks", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert set(found["parts"]) == {"rollout", "update"}
    assert found["parts"]["update"]["weights"] == 4 * 1235814400  # Llama 3.2 1B, trained in float32
    assert found["peak_bytes"] == max(sum(parts.values()) for parts in found["parts"].values())
    assert list(found["settings"]) == ["current", "recommended", "aggressive"]
    for setting in found["settings"].values():
        assert {"rows_per_pass", "rollouts_per_step", "passes_per_step", "bytes", "utilization"} <= set(setting)
    assert 0.4 < found["settings"]["recommended"]["utilization"] <= 0.6
    assert 0.6 < found["settings"]["aggressive"]["utilization"] <= 0.85


@pytest.mark.parametrize("ranks", ["1", "2", "4", "8"])
@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_every_embedded_recipe_is_planned_for_any_number_of_ranks(recipe, ranks, capsys):
    assert main(["plan", recipe, "--device-memory", "32GiB", "--ranks", ranks, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["current"]["ranks"] == int(ranks)


def test_help_explains_the_options_and_the_fields_of_the_recipe(config, capsys):
    for arguments in (["chat"], [config], []):
        assert main(["plan", *arguments, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "--device-memory" in text
        assert "--ranks" in text
        assert "--group-size" in text
        assert ("--workload.decode-rows" in text) == (arguments == ["chat"])


def test_options_and_fields_may_be_mixed_and_aliases_are_accepted(capsys):
    assert main(["plan", "chat", "--num-generations=4", "--num-gpus", "2", "--device-memory=32GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    current = json.loads(out)["settings"]["current"]
    assert (current["group_size"], current["ranks"]) == (4, 2)
    assert "--num-generations is called --group-size here." in err


def test_what_does_not_fit_says_by_how_much_and_what_to_reduce(config, capsys):
    assert main(["plan", config, "--device-memory", "24GiB"]) == 2
    said = capsys.readouterr()
    assert "What to reduce first" in said.out
    assert "1. rows_per_pass 8 -> 4: saves" in said.out
    assert "does not fit:" in said.err
    assert "are missing" in said.err


def test_a_picture_of_the_settings_is_drawn(config, tmp_path, capsys):
    picture = tmp_path / "plan.png"
    assert main(["plan", config, "--device-memory", "80GiB", f"--picture={picture}"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Three settings" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["chat", "controller"])
def test_recipes_are_planned(recipe, capsys):
    assert main(["plan", recipe, "--device-memory", "32GiB", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    expected = {"chat": ("KV cache", "activations"), "controller": ("prefix states", "frozen model")}[recipe]
    assert set(expected) <= set(parts["rollout"])


SMALL = ["--conditions-per-step", "2", "--group-size", "2", "--rows-per-pass", "2"]
FEW = {
    "chat": ["--workload.sampling.max-new-tokens", "8", "--workload.data.max-prompt-tokens", "64"],
    "controller": [
        "--workload.estimator",
        "proportional",
        "--workload.mosaics",
        "2",
        "--workload.held-out-mosaics",
        "1",
    ],
    "flow": ["--workload.scenes", "4", "--workload.held-out-scenes", "1"],
}


@pytest.mark.parametrize("recipe", FEW)
def test_recipes_are_traced_with_fake_tensors_and_probed_on_the_device(recipe, capsys):
    arguments = ["--device-memory", "32GiB", *SMALL, *FEW[recipe]]
    assert main(["plan", recipe, *arguments, "--trace", "--probe", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for stage, size in found["trace"].items():
        parts = found["parts"][stage]
        planned = sum(parts.values()) - parts["framework (margin)"]
        assert planned == pytest.approx(size, rel=0.10), stage
    assert "update" in found["trace"]
    assert set(found["probe"]) == {"rollout", "update"}
    assert min(found["probe"].values()) > found["parts"]["update"]["weights"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device-memory", "32 gigs"], "--device-memory is '32 gigs': it must be a number and a unit"),
        (["--device-memory", "1GiB"], "the weights alone take 4.6 GiB"),
        (["--ranks", "0"], "--ranks is 0: it must be at least 1"),
        (["--rows-per-pass", "0"], "rows_per_pass is 0: it must be at least 1"),
        (["--ranks", "3"], "does not divide over 3 ranks: placement 'whole' keeps each group on one rank. Nearest"),
    ],
)
def test_bad_input_is_a_clear_answer(config, arguments, says, capsys):
    device = [] if "--device-memory" in arguments else ["--device-memory", "80GiB"]
    assert main(["plan", config, *device, *arguments]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_an_unknown_architecture_and_a_workload_without_a_plan(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "rwkv"}))
    assert main(["plan", str(tmp_path), "--json"]) == 2
    assert "has model_type 'rwkv'" in json.loads(capsys.readouterr().out)["error"]
    assert main(["plan", "fakes:recipe"]) == 2
    assert "TinyConfig has no memory plan" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["chat", "controller", "flow"])
def test_a_sharded_recipe_has_the_same_parts_cut(recipe, capsys):
    arguments = ["plan", recipe, "--device-memory", "32GiB", "--ranks", "4", "--json"]
    assert main(arguments) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--shard", "full"]) == 0
    cut = json.loads(capsys.readouterr().out)
    for part in ("weights", "optimizer"):
        assert cut["parts"]["rollout"][part] == -(-whole["parts"]["rollout"][part] // 4)
    assert whole["sharding"] is None
    assert cut["sharding"] == {"ranks": 4, "over": "all", "rollout": "whole", "exchange": "pass"}
    assert [setting["fits"] for setting in cut["settings"].values()] == [True] * 3
    assert cut["fewest_ranks"]["ranks"] == 1


def test_auto_shards_where_a_whole_copy_does_not_fit(config, capsys):
    arguments = ["plan", config, "--ranks", "8", "--checkpointing", "--shard", "auto", "--json", "--device-memory"]
    assert main([*arguments, "80GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["sharding"] is None
    assert main([*arguments, "16GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["sharding"]["ranks"] == 8


def test_over_a_node(config, capsys):
    arguments = ["plan", config, "--shard", "full", "--shard-over", "node", "--device-memory", "80GiB", "--json"]
    assert main([*arguments, "--ranks", "16"]) == 0
    assert json.loads(capsys.readouterr().out)["sharding"]["ranks"] == 8
    assert main([*arguments, "--ranks", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["sharding"]["ranks"] == 4


@pytest.mark.parametrize(("rollout", "planned"), [("auto", "whole"), ("whole", "whole"), ("blocks", "blocks")])
def test_rollouts_gather_as_asked(config, rollout, planned, capsys):
    arguments = ["plan", config, "--shard", "full", "--shard-rollout", rollout, "--ranks", "4", "--json"]
    assert main([*arguments, "--device-memory", "80GiB"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"].values()
    assert {setting["sharding"]["rollout"] for setting in settings} == {planned}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "nothing to share"),
        (["--ranks", "12", "--shard-over", "node", "--conditions-per-step", "36"], "not divided evenly"),
        (["--ranks", "4", "--shard-over", "node", "--ranks-per-node", "1"], "not divided evenly|at least 2"),
    ],
)
def test_what_cannot_be_sharded_is_refused(config, arguments, message, capsys):
    assert main(["plan", config, "--shard", "full", "--device-memory", "80GiB", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_too_few_cards_are_told_how_many_fit(config, capsys):
    arguments = ["plan", config, "--shard", "full", "--ranks", "2", "--checkpointing", "--device-memory", "11GiB"]
    assert main(arguments) == 2
    assert "Or take more cards: 4 cards at" in capsys.readouterr().err.replace("\n", " ")
