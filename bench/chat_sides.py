"""The same tiny Llama, prompts and reward under groupwise's loop and under TRL's GRPOTrainer."""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import groupwise as gw
from groupwise.dist.comm import connect
from groupwise.memory.recovery import RowLimits
from groupwise.training.loop import training_steps
from groupwise.training.state import create_state
from groupwise.workloads.chat.config import PolicyConfig, SamplingParams
from groupwise.workloads.chat.engine.generate import generate
from groupwise.workloads.chat.engine.policy import make_policy
from groupwise.workloads.chat.engine.sampler import completion_mask, pad_rows
from groupwise.workloads.chat.engine.score import score, split_into_passes


@dataclass(frozen=True)
class Case:
    name: str
    prompt: int
    new: int
    group: int
    width: int = 128
    layers: int = 4
    vocabulary: int = 512
    stop_probability: float = 0.0
    """Probability of the stop token at each position; 0 for completions of max_new_tokens."""
    prompts: int = 2
    rows_per_pass: int | None = None
    """None for all rows of the step in one pass."""

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def stop(self) -> int:
        """A token of the model's vocabulary, or one beyond it, which is never sampled."""
        return 1 if self.stop_probability else self.vocabulary


def make_model(case: Case, seed: int = 0) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    heads = max(4, case.width // 64)
    config = transformers.LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=8 * case.width // 3 // 8 * 8,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=case.prompt + case.new,
        bos_token_id=None,
        eos_token_id=case.stop,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if case.stop_probability:
        _raise_stop_probability(model, case)
    return model


@torch.no_grad()
def _raise_stop_probability(model: transformers.LlamaForCausalLM, case: Case) -> None:
    """Make one component of the hidden states large and let the stop token's logit depend on it."""
    model.model.embed_tokens.weight[:, 0] = 4.0
    states = model.model(torch.tensor(make_prompts(case, 4))).last_hidden_state
    odds = case.stop_probability / (1 - case.stop_probability) * case.vocabulary
    model.lm_head.weight[:, 0] = 0
    model.lm_head.weight[case.stop] = 0
    model.lm_head.weight[case.stop, 0] = torch.tensor(odds).log() / states[:, -1, 0].mean()


def make_prompts(case: Case, count: int = 64, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(2, case.vocabulary) for _ in range(case.prompt)] for _ in range(count)]


def even_fraction(ids: Sequence[int]) -> float:
    """The reward: the fraction of tokens with an even id."""
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))


class EvenTokens(gw.Workload):
    """Groupwise's side: the chat engine under the training loop."""

    def __init__(self, case: Case, seed: int):
        self.case, self.prompts = case, make_prompts(case)
        self.policy = make_policy(make_model(case, seed), PolicyConfig(forward="shared_prefix"))
        self.num_conditions = len(self.prompts)
        self.sampling = SamplingParams(max_new_tokens=case.new, stop_token_ids=(case.stop,))
        self.tokens = 0

    def rollout(self, rows: gw.RolloutRows) -> gw.Rollouts:
        of = rows.condition.tolist()
        completions = generate(self.policy, self.prompts, of, rows, self.sampling)
        self.tokens = sum(map(len, completions))
        ids = torch.tensor([gw.group_id(prompt) for prompt in of])
        data = {"prompt": of, "completion": completions}
        return gw.Rollouts(
            ids, pad_rows([completion.logps for completion in completions]), completion_mask(completions), data
        )

    def rewards(self, rollouts: gw.Rollouts) -> gw.RewardTerms:
        rewards = [even_fraction(completion.ids) for completion in rollouts.data["completion"]]
        return gw.RewardTerms({"even": torch.tensor(rewards)})

    def score(self, rollouts: gw.Rollouts) -> gw.Scores:
        columns = rollouts.data["prompt"], rollouts.data["completion"]
        return score(self.policy, self.prompts, *columns, self.sampling, width=rollouts.logp.shape[1])

    def passes(self, rollouts: gw.Rollouts, rows_per_pass: int) -> list[torch.Tensor]:
        of, completions = rollouts.data["prompt"], rollouts.data["completion"]
        sizes = [len(self.prompts[prompt]) for prompt in of], list(map(len, completions))
        return split_into_passes(of, *sizes, rows_per_pass=rows_per_pass)


@dataclass(frozen=True)
class StepResult:
    seconds: float
    """CPU seconds: other programs on the machine do not count."""
    tokens: int
    reward: float


def groupwise_steps(case: Case, steps: int, *, rate: float = 1e-6, seed: int = 0) -> Iterator[StepResult]:
    workload = EvenTokens(case, seed)
    config = gw.Config(
        gw.WorkloadConfig(),
        steps=steps,
        seed=seed,
        conditions_per_step=case.prompts,
        group_size=case.group,
        rows_per_pass=case.rows_per_pass or case.rows,
        optimizer=gw.OptimizerConfig(learning_rate=rate),
        run=gw.RunConfig(samples_per_step=0),
    )
    shape = config.shape(conditions=workload.num_conditions)
    state = create_state(workload.policy, config.optimizer)
    state.cut = RowLimits(shape.rows_per_pass)
    taken = training_steps(workload, state=state, shape=shape, config=config, comm=connect())
    while True:
        begun = time.process_time()
        step = next(taken, None)
        if step is None:
            return
        result = StepResult(time.process_time() - begun, workload.tokens, step.metrics["reward"])
        print(f"groupwise: {result}", file=sys.stderr, flush=True)
        yield result


def make_tokenizer(case: Case) -> transformers.PreTrainedTokenizerFast:
    """Token n is written "tn"; the stop token may lie beyond the model's vocabulary."""
    words = {f"t{number}": number for number in range(case.vocabulary + 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"t{case.stop}", pad_token="t0", padding_side="left"
    )


def trl_trainer(case: Case, steps: int, micro_batch: int, *, rate: float = 1e-6, seed: int = 0, **changes: object):
    """TRL's side; `counted` collects its completions' lengths and rewards, step by step."""
    import datasets
    import trl

    for name in ("transformers", "trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    counted: list[tuple[int, float]] = []

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        rewards = [even_fraction(ids) for ids in completion_ids]
        counted.append((sum(map(len, completion_ids)), sum(rewards) / len(rewards)))
        return rewards

    texts = [" ".join(f"t{token}" for token in prompt) for prompt in make_prompts(case)]
    settings = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": steps,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": case.rows // micro_batch,
        "num_generations": case.group,
        "max_completion_length": case.new,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        "dataloader_pin_memory": False,
    }
    trainer = trl.GRPOTrainer(
        model=make_model(case, seed),
        reward_funcs=reward,
        args=trl.GRPOConfig(**{**settings, **changes}),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
        processing_class=make_tokenizer(case),
    )
    return trainer, counted


def run_trl(
    case: Case,
    steps: int,
    micro_batch: int,
    *,
    rate: float = 1e-6,
    seed: int = 0,
    between: Callable[[], None] | None = None,
) -> list[StepResult]:
    """All steps of TRL; `between` is called after each of them and is not timed."""
    trainer, counted = trl_trainer(case, steps, micro_batch, rate=rate, seed=seed)
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):
        begun = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.begun = time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.process_time() - self.begun)
            print(
                f"TRL, {micro_batch} rows a pass: {StepResult(seconds[-1], *counted[-1])}", file=sys.stderr, flush=True
            )
            if between is not None:
                between()

    trainer.add_callback(Clock())
    trainer.train()
    return [StepResult(spent, *counts) for spent, counts in zip(seconds, counted, strict=True)]
