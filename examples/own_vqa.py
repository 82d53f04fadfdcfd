"""Own data for the controller, made up: a folder of images with rows of image, question and answers.

The right answers are those of the model itself with all its crops, experts and blocks. So accuracy says how much of the
full model a cheaper configuration keeps, whatever the model is: any folder that groupwise loads can be named.

    python examples/own_vqa.py model --folder tiny-model                # or your own model
    python examples/own_vqa.py rows --model tiny-model --folder my-data
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from groupwise.workloads.controller.model.executor import AnswerRequest, Executor
from groupwise.workloads.controller.model.load import load_model

COLORS = {"red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "gray": (120, 120, 120)}
QUESTIONS = ("what color is it", "how many are there", "where is it", "is it red", "is it large")
WORDS = ["<unk>", "<image>", "user", "assistant", *COLORS, "yes", "no", "left", "right", "top", "one", "two", "three"]
WORDS += sorted({word for question in QUESTIONS for word in question.split()} - set(WORDS))
TEMPLATE = (
    "user {% for part in messages[0].content %}"
    "{% if part.type == 'image' %} <image>{% else %} {{ part.text }}{% endif %}{% endfor %} assistant"
)


def write_model(folder: Path) -> None:
    """A LLaVA with SigLIP and OLMoE, tiny and untrained, with a tokenizer and an image processor beside it."""
    torch.manual_seed(0)
    text = transformers.OlmoeConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        vision_use_head=False,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=WORDS.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", extra_special_tokens={"image_token": "<image>"}
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    transformers.SiglipImageProcessor().save_pretrained(folder)


def draw(random: np.random.Generator) -> Image.Image:
    """One to three rectangles on a gray ground."""
    pixels = random.integers(180, 220, (96, 128, 3), dtype=np.uint8)
    for _ in range(random.integers(1, 4)):
        top, left = random.integers(0, 64), random.integers(0, 96)
        height, width = random.integers(8, 32, 2)
        pixels[top : top + height, left : left + width] = random.choice(list(COLORS.values()))
    return Image.fromarray(pixels)


def write_rows(folder: Path, model: str, count: int, prompt: str) -> None:
    """Images, and `rows.jsonl` with {"image": ..., "question": ..., "answers": [...]} about them."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded, random = load_model(model), np.random.default_rng(0)
    executor, rows = Executor(loaded.adapter, loaded.options), []
    for first in range(0, count, len(QUESTIONS)):
        name = f"{first // len(QUESTIONS):04d}.png"
        draw(random).save(folder / name)
        questions = QUESTIONS[: count - first]
        samples = [loaded.front_end.sample(folder / name, prompt.replace("{question}", text)) for text in questions]
        answers, _ = executor.answer([AnswerRequest(sample, loaded.options.full) for sample in samples])
        rows += [
            {"image": name, "question": question, "answers": [loaded.front_end.decode(answer.tokens)]}
            for question, answer in zip(questions, answers, strict=True)
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("model", "rows"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="tiny-model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--prompt", default="{question}")
    options = parser.parse_args()
    if options.what == "model":
        write_model(options.folder)
    else:
        write_rows(options.folder, options.model, options.count, options.prompt)


if __name__ == "__main__":
    main()
