"""MolmoE as published: what the original code computes from a tiny folder is computed here, under all knobs."""

import json
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny.molmoe import (
    ASSET,
    MAX_CROPS,
    STEP,
    copy_folder,
    cut_down_tokenizer,
    patches_of,
    published_config,
    published_tensors,
    reference,
    sample_of,
    with_tier,
)
from torch.testing import assert_close

from groupwise.core.errors import UserError
from groupwise.workloads.controller.model.adapters import default_drop_order
from groupwise.workloads.controller.model.executor import AnswerRequest, Executor, PrefixItem
from groupwise.workloads.controller.model.inputs import prompt_length, prompt_token_ids, stop_token_id
from groupwise.workloads.controller.model.knobs import KnobOptions, Knobs
from groupwise.workloads.controller.model.load import load_model
from groupwise.workloads.controller.model.molmoe.modeling import MolmoeConfig, MolmoeForConditionalGeneration
from groupwise.workloads.controller.model.molmoe.sizes import image_token_count, read_sizes, tensor_shapes
from groupwise.workloads.controller.model.molmoe.tiling import (
    Tiling,
    choose_tiling,
    feature_order,
    image_masks,
    token_layout,
)
from groupwise.workloads.controller.model.molmoe.tokenizer import read_tokenizer

BLOCKS = range(5)


@pytest.fixture(scope="module")
def loaded():
    return load_model(ASSET)


@pytest.fixture(scope="module")
def known():
    return reference()


@pytest.fixture(scope="module")
def samples(loaded, known):
    return {case: sample_of(loaded, known, case) for case in MAX_CROPS}


def assert_near(actual, expected, most):
    assert np.abs(actual.numpy() - expected).max() < most


def test_all_1701_tilings_are_the_original_ones():
    with np.load(ASSET / "tilings.npz") as stored:
        table = stored["table"].tolist()
    assert len(table) == 1701
    for height, width, max_crops, *expected in table:
        tiling = choose_tiling((height, width), max_crops)
        sizes = tiling.rows, tiling.columns, *tiling.canvas, tiling.height, tiling.width
        assert [*sizes, 1 + image_token_count(tiling.rows, tiling.columns)] == expected


def test_token_counts_by_hand():
    # 1 x 1: the overview has 12 rows of 12 patches and an end, start and end around them: 158; the tile the same
    assert image_token_count(1, 1) == 2 * (12 * 13 + 2)
    # 3 x 2: (8 x 3 + 4) rows of (8 x 2 + 4) patches and an end
    assert image_token_count(3, 2) == 158 + 28 * 21 + 2


@pytest.mark.parametrize("case", ["wide", "tall"])
def test_crops_masks_and_positions_are_the_original_ones(samples, known, case):
    crops = samples[case].crops_by_tier
    patches = patches_of(crops["only"])
    assert_near(patches[:, known[f"{case}/sample_patch_index"]], known[f"{case}/sample_patches"], 1e-6)
    by_color = patches.double().view(len(patches), 576, 196, 3)
    assert_near(by_color.mean(2), known[f"{case}/patch_mean"], 1e-5)
    assert_near(by_color.std(2, unbiased=False), known[f"{case}/patch_std"], 1e-5)
    tiling = Tiling.of_shape(crops.shapes["only"])
    assert crops["only"].shape == tiling.shape[:4]
    assert_near(image_masks(tiling), known[f"{case}/image_masks"], 1e-6)
    _, positions = token_layout(tiling.rows, tiling.columns, (1, 2, 3, 4))
    input_idx = np.full(len(patches) * 144, -100)
    input_idx[feature_order(tiling.rows, tiling.columns)] = 1 + positions  # the first token comes before the image
    assert (input_idx == known[f"{case}/image_input_idx"].flatten()).all()


def test_a_mask_by_hand():
    # one tile of 336 with an image of 336 x 100: 118 pixels on the left, so patches 0 to 7 (112 pixels) show nothing,
    # patch 8 shows 14 - 6 = 8 of 14 columns, patches 9 to 14 all, patch 15 (210 to 224) those before 218
    own, last = image_masks(Tiling(1, 1, 336, 100)).view(2, 24, 24)
    assert_close(own[0], torch.tensor([0.0] * 8 + [8 / 14] + [1.0] * 6 + [8 / 14] + [0.0] * 8))
    assert (own == own[0]).all()
    assert (last == -1).all()


@pytest.mark.parametrize("case", ["wide", "tall"])
def test_the_prompt_is_the_original_one(loaded, samples, known, case):
    sample, ids = samples[case], known[f"{case}/input_ids"].tolist()
    tiling = Tiling.of_shape(sample.crops_by_tier.shapes["only"])
    image, _ = token_layout(tiling.rows, tiling.columns, loaded.adapter._layout_ids)
    assert [*sample.prefix_ids, *image.tolist(), *sample.question_ids] == ids
    assert prompt_length(loaded.adapter, sample, "only") == len(ids)
    assert stop_token_id(loaded) == 299


def test_all_published_prompts_have_the_ids_of_the_published_tokenizer(loaded, tmp_path):
    table = json.loads((ASSET / "published_prompts.json").read_text())
    cut_down_tokenizer().save(str(tmp_path / "tokenizer.json"))
    sizes = read_sizes(published_config(), "published")
    model = SimpleNamespace(config=MolmoeConfig.of_sizes(sizes))
    adapter = copy(loaded.adapter)
    adapter.text_config = model.config.text_config
    real = replace(loaded, tokenizer=read_tokenizer(tmp_path / "tokenizer.json", sizes), model=model, adapter=adapter)
    for prompt in table["prompts"]:
        content = [{"type": "image"}, {"type": "text", "text": prompt["prompt"]}]
        text = real.tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        assert text == "<|endoftext|><|image|>" + prompt["formatted"]
        assert prompt_token_ids(prompt["prompt"], real) == ((50279,), tuple(prompt["ids"]))


@torch.inference_mode()
@pytest.mark.parametrize("case", ["wide", "tall"])
def test_vision_is_the_original_one(loaded, samples, known, case):
    sample = samples[case]
    features = loaded.model.model.crop_features(sample.crops_by_tier["only"])
    assert_near(features[0, ::STEP], known[f"{case}/vit_features_crop0"], 3e-4)
    assert_near(features[-1, :32], known[f"{case}/vit_features_lastcrop_first32"], 3e-4)
    tiling = Tiling.of_shape(sample.crops_by_tier.shapes["only"])
    projected = loaded.model.model.connector(features, image_masks(tiling))
    step = 144 // known[f"{case}/image_features"].shape[1]
    assert_near(projected[:, ::step], known[f"{case}/image_features"], 3e-4)
    (prompt,) = loaded.adapter.encode([(sample, "only")]).prompts
    assert_near(prompt.states[::STEP], known[f"{case}/inputs_embeds"], 3e-4)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["wide", "tall", "text", "ids"])
def test_hidden_states_routers_and_logits_are_the_original_ones(loaded, samples, known, case):
    outputs = {"hidden": [], "router": []}
    hooks = [
        block.register_forward_hook(lambda *call: outputs["hidden"].append(call[2])) for block in loaded.adapter.blocks
    ]
    for block in loaded.adapter.blocks:
        hooks.append(block.mlp.gate.register_forward_hook(lambda *call: outputs["router"].append(call[2][2])))
    if case in samples:
        (prompt,) = loaded.adapter.encode([(samples[case], "only")]).prompts
        logits = loaded.model(inputs_embeds=prompt.states[None]).logits[0]
    else:
        logits = loaded.model(torch.from_numpy(known[f"{case}/input_ids"]).long()[None]).logits[0]
    for hook in hooks:
        hook.remove()
    for block in BLOCKS:
        assert_near(outputs["hidden"][block][0, ::STEP], known[f"{case}/hidden_{block}"], 2e-3)
        is_clear = known[f"{case}/router_is_clear_{block}"]
        chosen, expected = outputs["router"][block].sort().values.numpy(), np.sort(known[f"{case}/router_topk_{block}"])
        assert (chosen == expected)[is_clear].all()
        assert is_clear.mean() > 0.99
    assert_near(logits[::STEP], known[f"{case}/logits"], 1e-4)
    assert_near(logits[-1], known[f"{case}/logits_last"], 1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["text", "ids"])
def test_text_alone_is_continued_as_by_the_original_code(loaded, known, case):
    ids = known[f"{case}/input_ids"].tolist()
    for token in known[f"{case}/greedy"]:
        assert loaded.model(torch.tensor([ids])).logits[0, -1].argmax() == token
        ids.append(int(token))


@pytest.mark.parametrize("case", ["wide", "tall"])
def test_the_executor_answers_as_the_original_code(loaded, samples, known, case):
    options = with_tier(loaded, MAX_CROPS[case]).options
    (answer,), work = Executor(loaded.adapter, options).answer(
        [AnswerRequest(samples[case], options.full)], max_new_tokens=5
    )
    assert answer.tokens == tuple(known[f"{case}/greedy"])
    assert_near(answer.first_logits, known[f"{case}/logits_last"], 1e-4)
    assert work.crops == len(samples[case].crops_by_tier["only"])


@dataclass(frozen=True)
class OnePath(KnobOptions):
    """Knobs that always take the same path, also one that a controller cannot choose."""

    path: tuple[int, ...] = ()

    def block_path(self, knobs):
        return self.path


@pytest.mark.parametrize(
    ("knob", "path"),
    [
        ("topk_half", (2, 2, 2, 2, 2)),
        ("skip_block", (4, 4, 0, 4, 4)),
        ("topk1_block1", (4, 1, 4, 4, 4)),
        ("half_and_skip", (2, 2, 0, 2, 2)),
    ],
)
def test_knobs_act_as_in_the_original_code(loaded, samples, known, knob, path):
    options = OnePath({"only": 3}, 5, 4, (3,), (1,), 1, 1, path=path)
    (answer,), _ = Executor(loaded.adapter, options).answer([AnswerRequest(samples["wide"], options.full)])
    assert_near(answer.first_logits, known[f"wide/knob_{knob}"], 1e-4)
    assert np.abs(known[f"wide/knob_{knob}"] - known["wide/logits_last"]).max() > 0.5


def test_a_pixel_of_minus_one_zeroes_a_crop_by_the_published_rule_only(known):
    answers = {}
    for published in (False, True):
        loaded = load_model(ASSET, published_crop_rule=published)
        sample, options = sample_of(loaded, known, "minus1"), with_tier(loaded, 3).options
        pixels = sample.crops_by_tier["only"]
        assert (pixels == -1).flatten(1).sum(1).tolist() == [4, 0, 0, 0]
        with torch.inference_mode():
            zeroed = (loaded.model.model.crop_features(pixels) == 0).flatten(1).all(1)
            assert zeroed.tolist() == [published, False, False, False]
            assert loaded.model.model.crop_features(torch.full_like(pixels[:1], -1)).count_nonzero() == 0
        (answers[published],), _ = Executor(loaded.adapter, options).answer([AnswerRequest(sample, options.full)])
    assert_near(answers[False].first_logits, known["minus1/logits_last_training_rule"], 1e-4)
    assert_near(answers[True].first_logits, known["minus1/logits_last_original_rule"], 1e-4)


def small_sample(loaded, number, height, width):
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return loaded.front_end.sample(Image.fromarray(noise), f"question {number}?")


def test_a_batch_of_any_mix_answers_as_each_alone(loaded):
    small = replace(loaded, options=replace(loaded.options, crops_by_tier={"low": 1, "high": 2}))
    executor, options = Executor(small.adapter, small.options), small.options
    one, other = small_sample(small, 1, 300, 500), small_sample(small, 2, 260, 130)
    configurations = list(options.configurations())
    requests = [AnswerRequest((one, other)[index % 2], knobs) for index, knobs in enumerate(configurations[::5])]
    together, _ = executor.answer(requests, max_new_tokens=3)
    prefix = executor.run_prefix([PrefixItem([sample], tier) for sample in (one, other) for tier in ("low", "high")])
    continued, _ = executor.answer(requests, prefix=prefix, max_new_tokens=3)
    for request, answer, after_prefix in zip(requests, together, continued, strict=True):
        (alone,), _ = executor.answer([request], max_new_tokens=3)
        assert answer.tokens == after_prefix.tokens == alone.tokens
        assert_close(answer.first_logits, alone.first_logits, rtol=0, atol=1e-4)
        assert_close(after_prefix.first_logits, alone.first_logits, rtol=0, atol=1e-4)
    tokens = prefix.latency_tokens[one.name, "high"]
    assert set(tokens) == set(options.insertion_positions)


def test_the_latency_token_is_a_token_at_the_end_of_the_prompt(loaded):
    small = replace(loaded, options=replace(loaded.options, crops_by_tier={"low": 1}))
    sample = small_sample(small, 3, 300, 300)
    prefix = Executor(small.adapter, small.options).run_prefix([PrefixItem([sample], "low")])
    with torch.inference_mode():
        (prompt,) = small.adapter.encode([(sample, "low")]).prompts
        question = small.adapter.embed(torch.tensor(sample.question_ids))
        states = torch.cat([prompt.states, question.mean(0, keepdim=True)])
        outputs = small.model(inputs_embeds=states[None], output_hidden_states=True).hidden_states
    for position, token in prefix.latency_tokens[sample.name, "low"].items():
        assert_close(token, outputs[position][0, -1], rtol=0, atol=2e-4)


def test_names_and_shapes_of_the_published_checkpoint_are_what_the_loader_expects():
    sizes, published = read_sizes(published_config(), "published"), published_tensors()
    assert tensor_shapes(sizes) == published
    assert len(published) == 3573
    assert sum(np.prod(shape, dtype=int) for shape in published.values()) == 7_221_875_712
    stored = {name: tuple(weight.shape) for name, weight in load_file(ASSET / "model.safetensors").items()}
    assert tensor_shapes(read_sizes(json.loads((ASSET / "config.json").read_text()), "tiny")) == stored


def test_the_published_drop_order_is_the_default_of_the_published_size_alone(loaded):
    with torch.device("meta"):
        real = MolmoeForConditionalGeneration._from_config(MolmoeConfig.of_sizes(read_sizes(published_config(), "")))
    adapter = type(loaded.adapter)(real)
    assert list(adapter.published_drop_order) == [4, 13, 10, 2]
    order = default_drop_order(16, adapter.published_drop_order)
    assert order[:4] == [4, 13, 10, 2]
    assert sorted(order) == list(range(1, 15))
    assert not loaded.adapter.published_drop_order
    assert not loaded.drop_order_is_measured
    options = KnobOptions({"low": 3, "medium": 6, "high": 12}, 16, 8, tuple(order))
    assert [block for block, top_k in enumerate(options.block_path(Knobs("low", 1, 8, 12))) if not top_k] == [
        2,
        4,
        10,
        13,
    ]


def test_shards_and_dtypes_load_as_the_single_file(loaded, tmp_path):
    whole = loaded.model.state_dict()
    sharded = load_model(copy_folder(tmp_path / "sharded", shards=3), dtype="auto")
    assert sharded.model.dtype == torch.float32
    assert sharded.fingerprint == loaded.fingerprint
    half = load_model(copy_folder(tmp_path / "half", dtype=torch.bfloat16), dtype="auto").model
    assert half.dtype == torch.bfloat16
    cast = load_model(ASSET, dtype=torch.bfloat16).model
    for name, weight in cast.state_dict().items():
        assert torch.equal(weight, whole[name].bfloat16()), name
        assert torch.equal(weight, half.state_dict()[name]), name
    assert cast.model.language_model.rotary_emb.inv_freq.dtype == torch.float32


def test_only_stored_numbers_are_in_the_modules(loaded):
    stored = load_file(ASSET / "model.safetensors")
    unread = [weight for name, weight in stored.items() if ".resblocks.9." in name]
    total = sum(weight.numel() for weight in stored.values()) - sum(weight.numel() for weight in unread)
    assert sum(weight.numel() for weight in loaded.model.parameters()) == total
    embedding = torch.cat([stored[f"model.transformer.wte.{name}"] for name in ("embedding", "new_embedding")])
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding)


def test_bfloat16_answers_are_near(samples, known):
    loaded = load_model(ASSET, dtype=torch.bfloat16)
    options = with_tier(loaded, 3).options
    (answer,), _ = Executor(loaded.adapter, options).answer([AnswerRequest(samples["wide"], options.full)])
    assert np.corrcoef(answer.first_logits.float().numpy(), known["wide/logits_last"])[0, 1] > 0.99


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1)])
def test_an_image_without_pixels_in_one_direction_is_refused(loaded, height, width):
    with pytest.raises(UserError, match="is too narrow"):
        loaded.front_end.sample(Image.new("RGB", (width, height)), "What is this?")


def test_a_tier_without_crops_is_refused():
    with pytest.raises(UserError, match="number of crops of a tier is 0"):
        choose_tiling((300, 400), 0)
