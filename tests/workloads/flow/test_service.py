"""Rewards over HTTP on loopback: right answers, and every way in which a service fails. None of them is a zero."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.core.reward import weigh
from groupwise.rewards.http import HttpReward
from groupwise.rewards.load import named_rewards
from groupwise.workloads.flow.rewards import clip_rewards
from groupwise.workloads.flow.task import Condition

CLIPS = torch.linspace(-1, 1, 3 * 2 * 4 * 4 * 4).view(3, 2, 4, 4, 4)
CONDITIONS = [
    Condition(f"clip {nth}", camera=torch.eye(3, 4).flatten().repeat(4, 1), name=str(nth)) for nth in range(3)
]


class Judge(BaseHTTPRequestHandler):
    """Answers by its path; `flaky` fails the first two times."""

    calls: ClassVar[list[str]] = []
    seen: ClassVar[list[dict]] = []

    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Judge.calls.append(self.path)
        Judge.seen.append(told)
        rows = len(told["prompts"])
        if self.path == "/slow":
            time.sleep(1.0)
        if self.path == "/broken" or (self.path == "/flaky" and Judge.calls.count("/flaky") < 3):
            self.send_error(500)
            return
        answers = {
            "/nonsense": b"<html>",
            "/full": b'{"error": "CUDA out of memory"}',
            "/fussy": json.dumps({"rewards": [0.5] * (1 if rows == 1 else 9)}).encode(),
            "/words": json.dumps({"rewards": ["good"] * rows}).encode(),
            "/short": json.dumps({"rewards": [1.0]}).encode(),
            "/some": json.dumps({"rewards": [None] + [0.5] * (rows - 1)}).encode(),
        }
        content = answers.get(
            self.path, json.dumps({"rewards": [_brightness(c) for c in told["completions"]]}).encode()
        )
        try:
            self.send_response(200)
            self.end_headers()
            for part in [content[nth : nth + 1] for nth in range(40)] if self.path == "/trickle" else [content]:
                self.wfile.write(part)
                time.sleep(0.1 if self.path == "/trickle" else 0)
        except (BrokenPipeError, ConnectionResetError):  # the caller has stopped waiting
            pass

    def log_message(self, *_):
        pass


def _brightness(clip):
    raw = np.frombuffer(base64.b64decode(clip["base64"]), dtype=clip["dtype"]).reshape(clip["shape"])
    return float(raw.mean() / 127.5 - 1)


@pytest.fixture(scope="module")
def address():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def asked(url, **settings):
    return clip_rewards({"far": HttpReward(url, **{"pause_s": 0.01, **settings})}, CONDITIONS, CLIPS)


def test_clips_arrive_and_numbers_come_back(address):
    terms = asked(f"{address}/good", rows_per_request=2)
    assert terms.per_rollout["far"].tolist() == pytest.approx(CLIPS.flatten(1).mean(1).tolist(), abs=0.01)
    assert not terms.failures
    told = Judge.seen[-1]
    assert told["prompts"] == ["clip 2"]
    assert told["cameras"][0]["shape"] == [4, 12]
    assert told["sources"] == [None]


def test_a_service_that_fails_twice_is_asked_a_third_time(address):
    assert not asked(f"{address}/flaky", retries=2).failures
    assert Judge.calls.count("/flaky") == 3


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("broken", "HTTP Error 500"),
        ("nonsense", "JSONDecodeError"),
        ("words", "must be a number or null, not 'good'"),
        ("short", 'must be {"rewards": [3 numbers]}'),
        ("slow", "timed out"),
        ("trickle", "timed out: no whole answer in 0.3 s"),
    ],
)
def test_what_does_not_come_is_missing_with_its_reason(address, path, said):
    terms = asked(f"{address}/{path}", retries=1, timeout_s=0.3)
    assert terms.per_rollout["far"].isnan().all()
    assert said in terms.failures["far"]
    assert "in 2 tries" in terms.failures["far"]
    with pytest.raises(gw.UserError, match="3 of 3 rollouts of this step have no reward"):
        weigh(terms, gw.RewardConfig())


def test_a_service_that_is_down_is_missing_too():
    terms = asked("http://127.0.0.1:9/", retries=0)
    assert "refused" in terms.failures["far"]


def test_single_missing_rewards_are_counted(address):
    rewards = weigh(asked(f"{address}/some"), gw.RewardConfig(max_missing_fraction=0.5))
    assert rewards.missing == 1
    assert rewards.total[1:].tolist() == [0.5, 0.5]


def test_rewards_by_name(address):
    found = named_rewards([f"far={address}/good", "near=workloads.flow.small:warmth"], HttpReward("", retries=7))
    assert found["far"] == HttpReward(f"{address}/good", retries=7)
    assert (
        clip_rewards({"near": found["near"]}, CONDITIONS, CLIPS.repeat(1, 2, 1, 1, 1))
        .per_rollout["near"]
        .isfinite()
        .all()
    )
    for wrong, said in (
        (["far"], "name=module:function"),
        ([], "nothing to learn from"),
        (["a=nowhere:f"], "cannot be imported"),
        (["a=workloads.flow.small:nothing"], "cannot be imported"),
    ):
        with pytest.raises(gw.UserError, match=said):
            named_rewards(wrong, HttpReward(""))


def test_a_request_that_fails_takes_no_other_rows_reward(address):
    """Two requests: the first clip's is refused, the second's is not."""
    terms = asked(f"{address}/fussy", rows_per_request=2, retries=0)
    assert terms.per_rollout["far"].isnan().tolist() == [True, True, False]
    assert terms.failures["far"] == "returned None for 2 of 3 rows"


def test_a_service_out_of_memory_is_not_this_process_out_of_memory(address):
    terms = asked(f"{address}/full", retries=0)
    assert terms.per_rollout["far"].isnan().all()
    assert "out of memory" in terms.failures["far"]
