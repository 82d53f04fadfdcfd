"""Rewards over HTTP on loopback, for every workload: right answers, and every way in which a service fails."""

import dataclasses
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from services import RewardService, reward_service
from tiny.chat import chat_config, recipe
from tiny.controller import SmallConfig as SmallController
from workloads.flow.small import SmallConfig as SmallFlow

import groupwise as gw
from groupwise.core.placement import RolloutRows
from groupwise.core.reward import weigh
from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.rewards.http import HttpReward
from groupwise.rewards.load import load_reward_functions
from groupwise.workloads.chat.config import ChatRewardsConfig
from groupwise.workloads.flow.task import FlowTask

CPU = torch.device("cpu")
ROWS = 4


@pytest.fixture(scope="module")
def address():
    with reward_service() as address:
        yield address


@dataclass(frozen=True)
class FlowWithService(SmallFlow):
    rewards: RewardFunctionsConfig = field(default_factory=RewardFunctionsConfig)

    def task(self, device: torch.device) -> FlowTask:
        from dataclasses import replace

        return replace(super().task(device), rewards=load_reward_functions(self.rewards))


@pytest.fixture(scope="module", params=["chat", "controller", "flow"])
def reward_terms(request, tmp_path_factory):
    """Calls a service from a workload: the terms of four rollouts, and the rollouts."""
    folder = tmp_path_factory.mktemp("chat")
    configs = {
        "chat": lambda settings: chat_config(folder, rewards=ChatRewardsConfig(**settings)),
        "controller": lambda settings: SmallController(rewards=RewardFunctionsConfig(**settings)),
        "flow": lambda settings: FlowWithService(rewards=RewardFunctionsConfig(**settings)),
    }

    def call(url, **settings):
        functions = (f"{'accuracy' if request.param == 'controller' else 'far'}={url}",)
        workload = configs[request.param]({"functions": functions, "backoff_s": 0.01, **settings}).build(CPU)
        condition = torch.tensor([0, 0, 1, 1])
        with torch.no_grad():
            rollouts = workload.rollout(RolloutRows(0, 0, ROWS, condition, torch.tensor([0, 1, 0, 1]), condition))
            terms = workload.rewards(rollouts)
        name = functions[0].partition("=")[0]
        return gw.RewardTerms({"far": terms.per_rollout[name]}, {"far": terms.failures.get(name, "")}), rollouts

    call.workload = request.param
    return call


def test_what_is_sent_and_what_comes_back(address, reward_terms):
    RewardService.requests.clear()
    terms, rollouts = reward_terms(f"{address}/good", rows_per_request=3)
    first, second = RewardService.requests
    assert [len(first["completions"]), len(second["completions"])] == [3, 1]
    assert not terms.failures["far"]
    rewards = terms.per_rollout["far"].tolist()
    if reward_terms.workload == "chat":
        assert second["prompts"] == [[{"role": "user", "content": "say 1"}]]
        assert second["completions"][0][0]["role"] == "assistant"
        assert second["answer"] == ["#### 1"]
        assert second["completion_ids"] == [list(rollouts.data["completion"][3].ids)]
        assert rewards[3] == len(second["completions"][0][0]["content"])
    elif reward_terms.workload == "controller":
        assert second["completions"] == [rollouts.data["answer"][3]]
        assert second["prompts"] == ["5 7"]
        assert isinstance(second["answers"][0][0], str)
        assert isinstance(second["images"][0], str)
        assert rewards == [len(answer) for answer in rollouts.data["answer"]]
    else:
        assert second["completions"][0]["shape"] == [3, 5, 8, 8]
        assert second["completions"][0]["dtype"] == "uint8"
        assert second["cameras"][0]["shape"] == [5, 12]
        assert second["sources"][0]["dtype"] == "uint8"
        assert "scene" not in second  # an object of this process
        clips = rollouts.data["latents"].clamp(-1, 1)  # this model's latents are pixels
        assert rewards == pytest.approx(clips.flatten(1).mean(1).tolist(), abs=0.01)


def test_a_request_that_fails_twice_is_sent_a_third_time(address, reward_terms):
    RewardService.calls.clear()
    assert not reward_terms(f"{address}/flaky", retries=2)[0].failures["far"]
    assert RewardService.calls.count("/flaky") == 3


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("broken", "HTTP Error 500"),
        ("nonsense", "JSONDecodeError"),
        ("words", "must be a number or null, not 'good'"),
        ("short", 'must be {"rewards": [4 numbers]}'),
        ("endless", "the answer has more than 4 MiB"),
        ("slow", "timed out"),
        ("trickle", "timed out: no whole answer in 0.3 s"),
    ],
)
def test_rewards_that_do_not_arrive_are_missing_with_the_reason(address, reward_terms, path, says):
    terms, _ = reward_terms(f"{address}/{path}", retries=1, timeout_s=0.3)
    assert terms.per_rollout["far"].isnan().all()
    assert says in terms.failures["far"]
    assert "in 2 tries" in terms.failures["far"]
    with pytest.raises(gw.UserError, match="4 of 4 rollouts of this step have no reward"):
        weigh(terms, gw.RewardConfig())


def test_a_service_that_is_down_gives_missing_rewards(reward_terms):
    assert "refused" in reward_terms("http://127.0.0.1:9/", retries=0)[0].failures["far"]


@pytest.mark.parametrize(("path", "value"), [("null", "None"), ("nan", "nan")])
def test_single_missing_rewards_are_counted(address, reward_terms, path, value):
    terms, _ = reward_terms(f"{address}/{path}")
    assert terms.failures["far"] == f"returned {value} for 1 of 4 rows"
    rewards = weigh(terms, gw.RewardConfig(max_missing_fraction=0.5))
    assert rewards.missing == 1
    assert rewards.total[1:].tolist() == [0.5, 0.5, 0.5]


def test_a_request_that_fails_takes_no_other_rows_reward(address, reward_terms):
    """Two requests: that of the first three rows is refused, that of the fourth is not."""
    terms, _ = reward_terms(f"{address}/fussy", rows_per_request=3, retries=0)
    assert terms.per_rollout["far"].isnan().tolist() == [True, True, True, False]
    assert terms.failures["far"] == "returned None for 3 of 4 rows"


def test_a_service_out_of_memory_is_not_this_process_out_of_memory(address, reward_terms):
    terms, _ = reward_terms(f"{address}/full", retries=0)
    assert terms.per_rollout["far"].isnan().all()
    assert "out of memory" in terms.failures["far"]


def test_a_run_learns_from_a_service(address, tmp_path):
    """The whole loop; the service rewards the length of a completion."""
    from dataclasses import replace

    rewards = ChatRewardsConfig(functions=(f"long={address}/good",))
    config = recipe(tmp_path, rewards=rewards, data=replace(chat_config(tmp_path).data, held_out=""))
    summary = gw.train(replace(config, run=gw.RunConfig(run_dir=tmp_path / "run", preflight=False)))
    assert summary.steps == 3
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("reward/long") >= 3


def test_columns_as_json():
    """NaN is null, and a column with an object that JSON cannot hold is left out."""
    sent = {}

    class Recorded(HttpReward):
        def _request(self, body):
            import json

            sent.update(json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")))
            return b'{"rewards": [1.0]}'

    reward = Recorded("http://nowhere/")
    columns = {"a": [float("nan")], "b": [{"x": [1, None, "y"], "z": True}], "c": [object()], "d": [torch.ones(2)]}
    assert reward(["p"], ["c"], **columns) == [1.0]
    assert sent["a"] == [None]
    assert sent["b"] == columns["b"]
    assert "c" not in sent
    assert sent["d"][0]["shape"] == [2]


def recorded(reward, clips, **columns):
    """The requests that a reward function sends."""
    import json

    requests = []

    class Recorded(HttpReward):
        def _request(self, body):
            request = json.loads(body)
            requests.append(request | {"bytes": len(body)})
            for clip in request["completions"]:
                if "path" in clip:
                    assert np.load(clip["path"]).shape == tuple(clip["shape"])
            return json.dumps({"rewards": [1.0] * len(request["completions"])}).encode()

    settings = {field.name: getattr(reward, field.name) for field in dataclasses.fields(reward)}
    assert Recorded(**settings)(["p"] * len(clips), clips, **columns) == [1.0] * len(clips)
    return requests


def test_requests_are_limited_by_bytes():
    """A clip of 3,000 bytes is 4,000 in base64: two fit into 9,000."""
    clips = [torch.zeros(3, 10, 10, 10)] * 5
    requests = recorded(HttpReward("http://nowhere/", bytes_per_request=9_000), clips)
    assert [len(request["completions"]) for request in requests] == [2, 2, 1]
    assert max(request["bytes"] for request in requests) < 9_000
    requests = recorded(HttpReward("http://nowhere/", bytes_per_request=10), clips)
    assert [len(request["completions"]) for request in requests] == [1] * 5


def test_clips_are_files_where_the_service_shares_a_folder(tmp_path):
    clips = [torch.full((3, 2, 4, 4), value) for value in (-1.0, 1.0)]
    (request,) = recorded(HttpReward("http://nowhere/", shared_folder=tmp_path), clips, sources=clips)
    assert request["completions"][1].keys() == {"dtype", "shape", "path"}
    assert request["sources"][0]["shape"] == [3, 2, 4, 4]
    assert request["bytes"] < 1000
    assert not list(tmp_path.iterdir())  # deleted after the answer


def test_services_are_asked_before_all_rollouts_are_generated(address):
    """Nobody has asked for rewards yet, and the first pass has been judged."""
    RewardService.calls.clear()
    config = FlowWithService(rewards=RewardFunctionsConfig(functions=(f"far={address}/good",)))
    workload = config.build(CPU)
    condition = torch.tensor([0, 0, 1, 1])
    with torch.no_grad():
        rollouts = workload.rollout(RolloutRows(0, 0, 2, condition, torch.tensor([0, 1, 0, 1]), condition))
    deadline = time.monotonic() + 20
    while RewardService.calls.count("/good") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert RewardService.calls.count("/good") == 2  # one for each pass
    clips = rollouts.data["latents"].clamp(-1, 1).flatten(1).mean(1)
    order = torch.tensor([3, 0])
    assert workload.rewards(rollouts.select(order)).per_rollout["far"].tolist() == pytest.approx(
        clips[order].tolist(), abs=0.01
    )
