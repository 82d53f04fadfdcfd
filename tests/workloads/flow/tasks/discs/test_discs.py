"""Images that obey their prompt are paid and accepted; what is paid without obeying is refused by the judge."""

import pytest
import torch
from scipy import ndimage
from torch.testing import assert_close

import groupwise as gw
from groupwise.recipes import load_recipe
from groupwise.workloads.flow.tasks.discs.charts import draw_images_sheet
from groupwise.workloads.flow.tasks.discs.judge import connected_labels, judge_discs, judge_obeyed, obeys
from groupwise.workloads.flow.tasks.discs.matched_filter import find_discs
from groupwise.workloads.flow.tasks.discs.model import load_discs
from groupwise.workloads.flow.tasks.discs.rewards import area_rewards, disc_rewards, half_mask, reward_functions
from groupwise.workloads.flow.tasks.discs.scene import (
    DISC_AREA,
    RADIUS,
    WORDS,
    all_prompts,
    color_shares,
    decode,
    draw_latents,
    encode_meanings,
    parse_prompts,
)
from groupwise.workloads.flow.tasks.discs.task import discs_conditions
from groupwise.workloads.flow.tasks.sprites.model import load_sprites

PROMPTS = all_prompts(held_out=False) + all_prompts(held_out=True)
MEANINGS = parse_prompts(PROMPTS)
IMAGES = decode(draw_latents(3, torch.arange(len(PROMPTS)), MEANINGS))


def test_prompts_of_training_hold_all_pairs_of_words_and_no_held_out_prompt():
    trained, held_out = all_prompts(held_out=False), all_prompts(held_out=True)
    assert (len(set(trained)), len(set(held_out))) == (27, 9)
    assert not set(trained) & set(held_out)
    for first, second, kinds in ((0, 1, 9), (0, 3, 12), (1, 3, 12)):
        assert len({(prompt.split()[first], prompt.split()[second]) for prompt in trained}) == kinds


def test_words_are_encoded_in_their_order():
    words = encode_meanings(parse_prompts(["one blue disc top", "three red discs right"])).argmax(-1)
    assert [[WORDS[word] for word in row] for row in words.tolist()] == [
        ["one", "blue", "disc", "top"],
        ["three", "red", "discs", "right"],
    ]


@pytest.mark.parametrize("prompt", ["", "red discs", "two red disc left", "four red discs left", "two red discs left!"])
def test_an_unknown_prompt_is_refused(prompt):
    with pytest.raises(gw.UserError, match="embedded model knows"):
        parse_prompts([prompt])


def test_images_that_obey_are_paid_and_accepted():
    assert obeys(IMAGES, MEANINGS).all()
    assert judge_discs(PROMPTS, list(IMAGES)) == [1.0] * len(PROMPTS)
    for values in area_rewards(IMAGES, MEANINGS).values():
        assert values.min() > 0.9
    for values in disc_rewards(IMAGES, MEANINGS).values():
        assert values.min() > 0.999


@pytest.mark.parametrize("rewards", [disc_rewards, area_rewards])
def test_a_wrong_word_is_refused_and_costs_its_reward(rewards):
    for column, name in enumerate(("count", "color", "place")):
        others = MEANINGS.clone()
        others[:, column] = (others[:, column] + 1) % (4 if name == "place" else 3)
        paid, exact = rewards(IMAGES, others), rewards(IMAGES, MEANINGS)
        assert paid[name].mean() < exact[name].mean() - 0.3
        unchanged = [obeyed for obeyed in obeys(IMAGES, others).tolist() if obeyed]
        assert len(unchanged) == 0 or name == "place"  # a disc in a corner is left and at the top


def test_the_area_of_a_disc_by_hand():
    image = _paint([((-0.5, 0.25), RADIUS)])
    assert_close(color_shares(image).mean((2, 3)), torch.tensor([[DISC_AREA, 0.0, 0.0]]), rtol=0.03, atol=1e-3)
    paid = area_rewards(image, parse_prompts(["one red disc left"]))
    assert_close(paid["count"], torch.ones(1), rtol=0.05, atol=0)
    two = area_rewards(image, parse_prompts(["two red discs right"]))
    assert two["count"] < 0.05  # 1 - |1 - 2|
    assert two["place"] < 0.01


def test_the_matched_filter_finds_discs_by_hand():
    """Two of three discs are red, one of them is on the left; a disc of half the radius is none."""
    image = _paint([((-0.5, 0.0), RADIUS), ((0.5, 0.5), RADIUS)])
    paid = disc_rewards(image, parse_prompts(["one red disc left"]))
    assert_close(paid["count"], torch.tensor([0.5]), rtol=0.01, atol=0)  # 1 - |2 - 1| / 2
    assert (paid["color"].item(), paid["place"].item()) == (1.0, 0.5)
    assert disc_rewards(image, parse_prompts(["two blue discs left"]))["color"].item() == 0
    small = find_discs(_paint([((-0.5, 0.0), RADIUS), ((0.5, 0.5), RADIUS / 2)]))
    assert small.is_disc.sum() == 1
    assert small.explained.item() == pytest.approx(0.8, abs=0.05)  # areas as 4 to 1


def test_reward_functions_are_of_the_kind_that_is_asked_for():
    blob = _paint([((-0.5, 0.0), 2**0.5 * RADIUS)])
    arguments = {"prompts": ["two red discs left"], "completions": list(blob), "names": [""]}
    paid = {kind: reward_functions(kind)["count"](**arguments)[0] for kind in ("discs", "areas")}
    assert paid["areas"] > 0.9
    assert paid["discs"] < 0.5


def test_the_judge_refuses_what_cheats_the_areas():
    """One blob with the area of two discs; two discs that touch; a disc and two halves of one."""
    prompt, large = ["two red discs left"], 2**0.5 * RADIUS
    apart = [((-0.5, -0.5), RADIUS), ((-0.5, 0.5), RADIUS)]
    cheats = [[((-0.5, 0.0), large)], [((-0.5, -0.2), RADIUS), ((-0.5, 0.2), RADIUS)]]
    cheats += [[apart[0], ((-0.5, 0.3), RADIUS / 2**0.5), ((-0.5, 0.75), RADIUS / 2**0.5)]]
    assert judge_obeyed(prompt, list(_paint(apart))) == [1.0]
    for cheat in cheats:
        image = _paint(cheat)
        assert sum(values.item() for values in area_rewards(image, parse_prompts(prompt)).values()) > 2.75
        assert sum(values.item() for values in disc_rewards(image, parse_prompts(prompt)).values()) < 2.6
        assert judge_obeyed(prompt, list(image)) == [0.0]


def test_an_empty_image_earns_next_to_nothing():
    image = _paint([])
    paid = area_rewards(image, parse_prompts(["one red disc left"]))
    assert paid["color"] + paid["place"] < 0.05
    assert sum(values.item() for values in disc_rewards(image, parse_prompts(["one red disc left"])).values()) < 0.05
    assert judge_obeyed(["one red disc left"], list(image)) == judge_discs([""], list(image)) == [0.0]


def test_connected_areas_are_those_of_scipy():
    masks = torch.rand(20, 24, 24, generator=torch.Generator().manual_seed(0)) < 0.45
    for mask, labels in zip(masks, connected_labels(masks), strict=True):
        theirs, count = ndimage.label(mask.numpy(), structure=[[1] * 3] * 3)
        pairs = torch.stack([labels.flatten(), torch.from_numpy(theirs).flatten().long()], dim=1).unique(dim=0)
        assert len(pairs) == count + 1  # one of theirs for each of ours, and the outside


def test_halves_by_hand():
    masks = half_mask(torch.arange(4), 4)
    assert masks[:, 0, 0].tolist() == [1, 0, 1, 0]
    assert masks[:, 3, 0].tolist() == [1, 0, 0, 1]
    assert_close(masks.mean((1, 2)), torch.full((4,), 0.5))


def test_the_sheet_shows_the_verdicts(tmp_path):
    from PIL import Image

    conditions = discs_conditions(["two red discs left", "one red disc right"], 1)
    image = _paint([((-0.5, -0.5), RADIUS), ((-0.5, 0.5), RADIUS)])
    draw_images_sheet(conditions, image.repeat(2, 1, 1, 1))(tmp_path / "sheet.png")
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    colors = {color for _, color in sheet.getcolors(maxcolors=100_000)}
    assert {(0x22, 0x88, 0x33), (0xCC, 0x33, 0x11)} <= colors


def test_the_plan_of_the_recipe_is_that_of_a_traced_step():
    config = load_recipe("flow-image")
    spec = config.step_spec()
    planned, traced = config.workload.memory_model().predict(spec), config.workload.trace_memory(spec)
    assert sum(planned.update.values()) == pytest.approx(traced["update"], rel=0.1)


@pytest.mark.parametrize("load", [load_discs, load_sprites])
def test_a_folder_without_a_model_is_refused_with_the_remedy(tmp_path, load):
    with pytest.raises(gw.UserError, match=r"holds no config.json and no model.safetensors.*leave it out"):
        load(tmp_path / "nowhere")


def _paint(discs):
    """Red discs of these centers and radii."""
    axis = (torch.arange(16) + 0.5) / 8 - 1
    down, right = torch.meshgrid(axis, axis, indexing="ij")
    inside = [radius - ((right - x).square() + (down - y).square()).sqrt() for (x, y), radius in discs]
    red = torch.stack([torch.full_like(right, -1.0), *inside]).amax(0).div(0.15).clamp(-1, 1)
    return decode(torch.stack([red, -torch.ones_like(red), -torch.ones_like(red)])[None])
