"""Anything that comes from outside is either used or refused in a sentence: settings, data, checkpoints, run folders,
controllers and answers of services. A `UserError` is a refusal; whatever else is raised fails the test."""

import gzip
import io
import json
import math
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache

import pytest
import torch
from fakes import TinyConfig, recipe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from services import raw_service

import groupwise as gw
from groupwise.cli.main import main
from groupwise.core.errors import UserError
from groupwise.data.rows import RowFilter, read_rows
from groupwise.recipes import load_recipe
from groupwise.rewards.http import HttpReward, ServiceError, _parse_rewards
from groupwise.training.loop import train_step
from groupwise.training.run import train
from groupwise.training.run_folder.checkpoint import restore
from groupwise.training.setup import set_up
from groupwise.workloads.checkpoint_files import (
    METADATA_FILE,
    metadata_hash,
    newest_valid_checkpoint,
    read_metadata,
    read_weights,
)
from groupwise.workloads.controller.config import BudgetConfig
from groupwise.workloads.controller.latency.estimates import ProportionalEstimator
from groupwise.workloads.controller.model.knobs import KnobOptions
from groupwise.workloads.controller.serving.files import ControllerSettings, _read_config, settings_to_files
from groupwise.workloads.controller.task import ModelSource

bounded = settings(max_examples=40, suppress_health_check=list(HealthCheck))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
WHOLE = st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 10**7, 10**12, 10**30])
REAL = st.sampled_from([-1.0, 0.0, 1e-30, 1e-3, 0.5, 0.999, 1.0, 1e3, 1e300, math.inf, math.nan])


def refused_or(call):
    """The call's result; None where it is refused."""
    message = ""
    try:
        return call()
    except UserError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


@st.composite
def configs(draw):
    def chosen(**fields):
        return {name: draw(value) for name, value in fields.items() if draw(st.integers(0, 9)) == 0}

    return refused_or(
        lambda: replace(
            recipe(),
            workload=TinyConfig(**chosen(missing_member=st.integers(0, 3), flat_below=st.integers(0, 40))),
            advantage=gw.AdvantageConfig(
                **chosen(
                    kind=st.sampled_from(["group_std", "batch_std", "centered", "leave_one_out", "best"]),
                    eps=REAL,
                    clip=st.none() | REAL,
                )
            ),
            reward=gw.RewardConfig(**chosen(max_missing_fraction=REAL, weights=st.sampled_from([{}, {"share": 2.0}]))),
            loss=gw.LossConfig(
                **chosen(
                    kind=st.sampled_from(["clipped", "policy_gradient", "ranking"]),
                    ratio=st.sampled_from(["decision", "rollout"]),
                    denominator=st.sampled_from(["decisions", "rollouts", "constant"]),
                    constant=st.none() | REAL,
                    clip_low=REAL,
                    clip_high=REAL,
                    kl=REAL,
                    entropy=REAL,
                )
            ),
            optimizer=gw.OptimizerConfig(
                **chosen(
                    learning_rate=REAL,
                    schedule=st.sampled_from(["constant", "linear", "cosine"]),
                    warmup_updates=WHOLE,
                    weight_decay=REAL,
                    betas=st.tuples(REAL, REAL),
                    max_grad_norm=st.none() | REAL,
                    updates_per_step=st.sampled_from([-1, 0, 1, 2, 10**12]),
                    ema_decay=st.none() | REAL,
                )
            ),
            **chosen(
                steps=WHOLE,
                seed=st.integers(-(2**70), 2**70),
                conditions_per_step=WHOLE,
                group_size=WHOLE,
                rows_per_pass=WHOLE,
                refill=st.integers(-1, 3),
                placement=st.sampled_from(["whole", "spread", "shuffled", "nowhere", "nowhere:function"]),
                shard=st.sampled_from(["none", "auto", "full"]),
                shard_over=st.sampled_from(["all", "node"]),
                shard_rollout=st.sampled_from(["auto", "whole", "blocks"]),
                shard_exchange=st.sampled_from(["pass", "update"]),
            ),
        )
    )


@bounded
@given(configs())
def test_each_config_runs_a_step_or_is_refused(config):
    if config is not None:
        refused_or(lambda: train_step(set_up(config)))


@st.composite
def image_configs(draw):
    """flow-image in small, with one or two settings of any value."""
    base = load_recipe("flow-image")
    sampling, window = base.workload.sampling, base.workload.sampling.window
    values = {
        "sampling": dict.fromkeys(("num_inference_steps",), WHOLE)
        | dict.fromkeys(("shift", "eta", "guidance_scale"), REAL)
        | {"stepper": st.sampled_from(["flow_sde", "dance_sde", "cps", "cps_distance"])}
        | {"shared_noise": st.booleans(), "latent_dtype": st.sampled_from(["float32", "bfloat16"])},
        "window": {"kind": st.sampled_from(["all", "first", "sliding"]), "share": REAL, "size": WHOLE, "every": WHOLE},
        "train": {"part": st.sampled_from(["lora", "camera", "recam", "all"]), "lora_rank": WHOLE, "lora_alpha": WHOLE},
        "workload": dict.fromkeys(("images_per_prompt", "cached_conditions", "encode_rows", "eval_steps"), WHOLE)
        | {"reward": st.sampled_from(["discs", "areas"]), "reference": st.booleans()}
        | {"gradient_checkpointing": st.booleans()},
    }
    chosen = {part: {} for part in values}
    for _ in range(draw(st.integers(1, 2))):
        part = draw(st.sampled_from(sorted(values)))
        name = draw(st.sampled_from(sorted(values[part])))
        chosen[part][name] = draw(values[part][name])
    small = {"num_inference_steps": 3, **chosen["sampling"]}
    return refused_or(
        lambda: replace(
            base,
            steps=1,
            conditions_per_step=2,
            group_size=2,
            rows_per_pass=4,
            workload=replace(
                base.workload,
                sampling=replace(sampling, window=replace(window, **chosen["window"]), **small),
                train=replace(base.workload.train, **chosen["train"]),
                **{"images_per_prompt": 1, **chosen["workload"]},
            ),
        )
    )


@settings(bounded, max_examples=15)
@given(image_configs())
def test_each_config_of_flow_image_runs_a_step_or_is_refused(config):
    if config is not None and config.workload.sampling.num_inference_steps <= 8:  # others only take their time
        refused_or(lambda: train_step(set_up(config)))


LINES = st.lists(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()), max_size=4)


@bounded
@given(lines=LINES, on_bad_row=st.sampled_from(["refuse", "skip"]))
def test_jsonl_is_read_or_refused(tmp_path_factory, lines, on_bad_row):
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_bytes(b"\n".join(lines))
    records = refused_or(lambda: read_rows(str(file), RowFilter(on_bad_row, "on_bad_row")))
    assert records is None or all(isinstance(row, dict) for row in records.rows)


@st.composite
def damages(draw):
    """A function of bytes: some cut off, overwritten or inserted."""
    place, length, junk = draw(st.floats(0, 1)), draw(st.integers(0, 64)), draw(st.binary(max_size=16))

    def damage(content: bytes) -> bytes:
        start = int(place * len(content))
        return content[:start] + junk + content[start + length :]

    return damage


@cache
def parquet_bytes():
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"prompt": ["a", "b", None], "answer": [1, 2, 3], "nested": [[1], [], [2, 3]]})
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


@bounded
@given(damage=damages())
def test_parquet_is_read_or_refused(tmp_path_factory, damage):
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    file.write_bytes(damage(parquet_bytes()))
    refused_or(lambda: read_rows(str(file), RowFilter("skip", "on_bad_row")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with two checkpoints."""
    folder, config = tmp_path_factory.mktemp("run") / "run", recipe()
    train(replace(config, steps=4, run=replace(config.run, run_dir=folder, checkpoint_every=2, preflight=False)))
    return folder


@pytest.fixture(scope="module")
def state(run):
    return set_up(recipe()).state


@bounded
@given(name=st.sampled_from(["checkpoint.json", "policy.safetensors", "optimizer.safetensors"]), damage=damages())
def test_damaged_bytes_of_a_checkpoint_are_noticed(run, state, tmp_path_factory, name, damage):
    folder = tmp_path_factory.mktemp("damaged") / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    file = folder / "step-000004" / name
    before = file.read_bytes()
    file.write_bytes(damage(before))
    newest = newest_valid_checkpoint(folder, lambda text: None)
    harmless = name == "checkpoint.json" and read_or_none(file) == json.loads(before)
    assert newest.name == ("step-000004" if file.read_bytes() == before or harmless else "step-000002")
    restore(newest, state)
    assert state.step in (2, 4)


def read_or_none(file):
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


@bounded
@given(name=st.sampled_from(["step", "updates", "ranks", "row_limits", "config", "versions"]), value=JSON)
def test_metadata_of_other_types_with_right_hashes_is_refused(run, state, tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("forged") / "checkpoints"
    shutil.copytree(run / "checkpoints", folder)
    metadata = {**read_metadata(folder / "step-000004"), name: value}
    metadata["sha256"][METADATA_FILE] = metadata_hash(metadata)
    (folder / "step-000004" / METADATA_FILE).write_text(json.dumps(metadata))
    newest = refused_or(lambda: newest_valid_checkpoint(folder, lambda text: None))
    if newest is not None:
        refused_or(lambda: restore(newest, state))


FILES = ("config.json", "metrics.jsonl", "samples.jsonl", "eval.json", "plan.json", ".owner.json")


@settings(bounded, max_examples=20)
@given(name=st.sampled_from(FILES), content=st.binary(max_size=40) | JSON.map(lambda v: json.dumps(v).encode() + b"\n"))
def test_a_report_of_any_run_folder_is_made_or_refused(run, tmp_path_factory, name, content):
    folder = tmp_path_factory.mktemp("stranger") / "run"
    shutil.copytree(run, folder)
    (folder / name).write_bytes(content)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as messages:
        assert main(["report", str(folder)]) in (0, 2)
    assert "Traceback" not in messages.getvalue()


@settings(bounded, max_examples=100)
@given(answer=st.binary(max_size=40) | JSON.map(lambda v: json.dumps({"rewards": v}).encode()))
def test_an_answer_of_a_service_is_rewards_or_an_error_of_the_service(answer):
    try:
        rewards = _parse_rewards(answer, 2)
    except (ValueError, ServiceError):
        return
    assert len(torch.tensor([math.nan if value is None else float(value) for value in rewards])) == 2


@pytest.fixture(scope="module")
def raw_answers():
    """What a service on loopback answers with, and the reward function that asks it."""
    answers = []
    with raw_service(answers) as url:
        yield answers, HttpReward(url, timeout_s=0.3, retries=0)


def asked(raw_answers, *parts):
    """The rewards of two rows; None where the service gave none."""
    answers, function = raw_answers
    answers[:] = parts
    start = time.monotonic()
    try:
        rewards = function(["p", "q"], ["a", "b"])
    except ServiceError:
        rewards = None
    assert time.monotonic() - start < 3
    return rewards


def http(body=b'{"rewards": [1, 0.5]}', status=b"200 OK", headers=b""):
    return b"HTTP/1.1 " + status + b"\r\n" + headers + b"\r\n" + body


def test_right_answers_are_taken_whatever_their_type_and_length_say(raw_answers):
    for headers in (b"", b"Content-Type: text/html\r\n", b"Content-Length: 21\r\n", b"Content-Length: 99\r\n"):
        assert asked(raw_answers, http(headers=headers)) == [1, 0.5]
    chunked = b"15\r\n" + b'{"rewards": [1, 0.5]}' + b"\r\n0\r\n\r\n"
    assert asked(raw_answers, http(chunked, headers=b"Transfer-Encoding: chunked\r\n")) == [1, 0.5]
    nan, infinite = asked(raw_answers, http(b'{"rewards": [NaN, 1e999]}'))
    assert (math.isnan(nan), math.isinf(infinite)) == (True, True)  # missing, as those of a function


WRONG = {
    "404": [http(status=b"404 Not Found")],
    "500": [http(status=b"500 Oops")],
    "204": [http(b"", status=b"204 No Content")],
    "status of 30 digits": [http(status=b"9" * 30)],
    "no HTTP": [b"\xff" * 99],
    "nothing": [],
    "cut": [http(b'{"rewards": [1, 0.5')],
    "shorter than it says": [http(b'{"rewards": [1,', headers=b"Content-Length: 21\r\n")],
    "longer than it says": [http(headers=b"Content-Length: 5\r\n")],
    "a length of 30 digits": [http(b"{", headers=b"Content-Length: " + b"9" * 30 + b"\r\n")],
    "chunks without a length": [http(b"zz\r\nx", headers=b"Transfer-Encoding: chunked\r\n")],
    "a chunk of 2^60": [http(b"1000000000000000\r\nx", headers=b"Transfer-Encoding: chunked\r\n")],
    "gzip": [http(gzip.compress(b" " * (1 << 26)), headers=b"Content-Encoding: gzip\r\n")],
    "too many": [http(b'{"rewards": [1, 2, 3]}')],
    "a drip": [http(b""), *[b" ", 0.1] * 10, b'{"rewards": [1, 1]}'],
    "headers without end": [b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 300],
    "a header of a megabyte": [b"HTTP/1.1 200 OK\r\nX: ", b"y" * (1 << 20)],
    "continue, for ever": [b"HTTP/1.1 100 Continue\r\n\r\n", 0.1] * 10,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_is_an_error_of_the_service_within_its_time(raw_answers, wrong):
    assert asked(raw_answers, *WRONG[wrong]) is None


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"303 See Other", b"307 Again", b"308 Moved"])
def test_a_service_cannot_send_us_elsewhere(raw_answers, status):
    with raw_service([http()]) as elsewhere:
        assert asked(raw_answers, http(status=status, headers=f"Location: {elsewhere}\r\n".encode())) is None


@settings(bounded, max_examples=50)
@given(
    status=st.sampled_from([b"200 OK", b"200", b"-1 x", b"\xff", b"206 Partial", b"101 Switch", b"200 " + b"x" * 9999]),
    headers=st.lists(
        st.sampled_from([b"Content-Length", b"Transfer-Encoding", b"Content-Encoding", b"Connection", b""]).flatmap(
            lambda name: st.binary(max_size=8).map(lambda value: name + b": " + value + b"\r\n")
        ),
        max_size=3,
    ),
    body=st.binary(max_size=40) | JSON.map(lambda v: json.dumps({"rewards": v}).encode()),
)
def test_any_bytes_of_a_service_are_rewards_or_an_error_of_the_service(raw_answers, status, headers, body):
    rewards = asked(raw_answers, http(body, status, b"".join(headers)))
    assert rewards is None or len(rewards) == 2


@pytest.mark.parametrize("answer", [b"[" * 10**5, b'{"rewards": [1, 1' + b"0" * 400 + b"]}"])
def test_an_answer_that_is_too_deep_or_too_large_is_an_error_of_the_service(answer):
    with pytest.raises((ValueError, ServiceError)):
        _parse_rewards(answer, 2)


@cache
def controller_config():
    options = KnobOptions({"low": 3, "high": 12}, total_blocks=12, full_top_k=8, drop_order=tuple(range(6, 12)))
    chosen = ControllerSettings(
        ModelSource("mosaic", "0" * 32), 64, options, BudgetConfig(), 8, None, ProportionalEstimator(options)
    )
    return json.loads(settings_to_files(chosen)["config.json"])


@settings(bounded, max_examples=150)
@given(st.data())
def test_the_config_of_a_controller_is_used_or_refused(tmp_path_factory, data):
    config = json.loads(json.dumps(controller_config()))
    inner = config
    while True:
        name = data.draw(st.sampled_from(sorted(inner)))
        if not isinstance(inner[name], dict) or not inner[name] or data.draw(st.booleans()):
            break
        inner = inner[name]
    if data.draw(st.booleans()):
        inner[name] = data.draw(JSON | WHOLE)
    else:
        del inner[name]
    folder = tmp_path_factory.mktemp("controller")
    (folder / "config.json").write_text(json.dumps(config))
    content = refused_or(lambda: _read_config(folder))
    if content is not None:
        budget = {name: tuple(value) if isinstance(value, list) else value for name, value in content["budget"].items()}
        refused_or(lambda: KnobOptions(**content["options"]).configurations())
        refused_or(lambda: BudgetConfig(**budget))


@cache
def whole_weights():
    return {"policy/head": torch.arange(12.0).view(4, 3), "policy/bias": torch.ones(2)}


@settings(bounded, max_examples=60)
@given(offset=JSON | st.lists(WHOLE, min_size=2, max_size=2), where=st.sampled_from(["none", "file", "name", "offset"]))
def test_the_parts_of_a_sharded_checkpoint_are_put_together_or_refused(tmp_path_factory, offset, where):
    """Whatever a stranger says about where a part begins, with right hashes."""
    folder = tmp_path_factory.mktemp("parts")
    for part in (0, 1):
        tensors = {name: whole.chunk(2)[part].clone() for name, whole in whole_weights().items()}
        begins = {name: [part * len(own), *[0] * (own.ndim - 1)] for name, own in tensors.items()}
        places = {name: {"saved_offsets": begin} for name, begin in begins.items()}
        if part and where == "offset":
            places["policy/head"] = {"saved_offsets": offset}
        if part and where == "name":
            places["policy/head"] = offset
        info = json.dumps(offset if part and where == "file" else places)
        file = folder / f"shard-{part + 1:05d}-model-00001-of-00001.safetensors"
        save_file(tensors, file, metadata={"DCP_SHARDING_INFO": info})
    read = refused_or(lambda: dict(read_weights(folder, ema=False)))
    if where == "none" or (where == "offset" and offset == [2, 0]):
        assert all(torch.equal(read[name.removeprefix("policy/")], whole) for name, whole in whole_weights().items())
