"""Settings of tiny pipelines, as a recipe gives them."""

from groupwise.rewards.config import RewardFunctionsConfig
from groupwise.workloads.flow.config import TrainConfig
from groupwise.workloads.flow.sampling.schedule import SamplingConfig, WindowConfig
from groupwise.workloads.flow.tasks.pipelines import RecamConfig, Sd3Config

WARMTH = RewardFunctionsConfig(functions=("warmth=workloads.flow.small:warmth",))
LORA = TrainConfig(lora_rank=2, lora_alpha=4)


def recam(wan, lines, **settings):
    sampling = SamplingConfig(steps=3, guidance=2.0, storage="bfloat16", window=WindowConfig("moving", 1.0, size=1))
    defaults = {"pipeline": wan, "data": lines, "rewards": WARMTH, "train": LORA}
    sizes = {"frames": 5, "height": 16, "width": 16, "dtype": "float32"}
    return RecamConfig(sampling, **{"reference": True, **defaults, **sizes, **settings})


def pictures(sd3, **settings):
    defaults = {"pipeline": sd3 / "pipeline", "data": sd3 / "prompts.jsonl", "train": LORA, "reference": True}
    sizes = {"height": 16, "width": 16, "dtype": "float32"}
    sampling = SamplingConfig(steps=3, guidance=3.0, window=WindowConfig("moving", 1.0, size=1))
    return Sd3Config(sampling, rewards=WARMTH, **{**defaults, **sizes, **settings})
