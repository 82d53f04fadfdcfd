"""A tiny MolmoE folder in the published format, and what the original code computes from it.

`molmoe_asset/reference.npz` holds the numbers of four inputs and of four settings of the knobs, most at each 16th
token; `tilings.npz` 1,701 tilings, `published_tensors.json` and `published_prompts.json` what the real model has.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from groupwise.workloads.controller.model.adapters import Sample
from groupwise.workloads.controller.model.load import LoadedModel

ASSET = Path(__file__).parent / "molmoe_asset"
STEP = 16
"""Of the tokens whose hidden states and logits are in the reference."""
PROMPTS = {"wide": "Describe this image.", "tall": "How many birds are there?", "minus1": "Describe this image."}
MAX_CROPS = {"wide": 3, "tall": 12, "minus1": 3}
_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json")


def reference() -> Mapping[str, np.ndarray]:
    with np.load(ASSET / "reference.npz") as stored:
        return dict(stored)


def with_tier(loaded: LoadedModel, max_crops: int) -> LoadedModel:
    """The model with one tier."""
    return replace(loaded, options=replace(loaded.options, crops_by_tier={"only": max_crops}))


def sample_of(loaded: LoadedModel, known: Mapping[str, np.ndarray], case: str) -> Sample:
    image = Image.fromarray(known[f"{case}/image"])
    return with_tier(loaded, MAX_CROPS[case]).front_end.sample(image, PROMPTS[case])


def patches_of(crops: Tensor) -> Tensor:
    """Crops as the original has them: patches, each by row, column and color of its pixels."""
    return crops.unfold(2, 14, 14).unfold(3, 14, 14).permute(0, 2, 3, 4, 5, 1).reshape(len(crops), 576, 588)


def copy_folder(folder: Path, *, shards: int = 0, dtype: torch.dtype = torch.float32, **config: object) -> Path:
    """The folder with other fields in config.json; with its weights in shards and an index."""
    folder.mkdir(parents=True)
    for name in _MODEL_FILES:
        shutil.copy(ASSET / name, folder / name)
    content = json.loads((ASSET / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    if shards or dtype != torch.float32:
        write_shards(folder, shards, dtype)
    return folder


def write_shards(folder: Path, shards: int, dtype: torch.dtype = torch.float32) -> None:
    weights = {name: weight.to(dtype) for name, weight in load_file(ASSET / "model.safetensors").items()}
    if not shards:
        save_file(weights, folder / "model.safetensors")
        return
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(itertools.islice(weights.items(), shard, None, shards))
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def published_config() -> dict[str, object]:
    """The config.json of MolmoE-1B-0924."""
    content = json.loads((ASSET / "config.json").read_text())
    text = {"d_model": 2048, "n_layers": 16, "n_heads": 16, "moe_num_experts": 64, "moe_top_k": 8}
    text |= {"vocab_size": 50280, "embedding_size": 50304, "max_sequence_length": 4096}
    vision = {"image_emb_dim": 1024, "image_num_layers": 23, "image_num_heads": 16, "image_mlp_dim": 4096}
    return {**content, **text, "vision_backbone": {**content["vision_backbone"], **vision}}


def published_tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of all 3,573 tensors that the original code has for this configuration."""
    table = json.loads((ASSET / "published_tensors.json").read_text())
    return {
        name.format(*indices): tuple(shape)
        for name, (counts, shape) in table.items()
        for indices in itertools.product(*map(range, counts))
    }


def cut_down_tokenizer() -> Tokenizer:
    """The words of the published prompts with the ids that the real tokenizer gives them.

    Most are one token. Where one is several, so it is here; which letters each of them has is made up.
    """
    table = json.loads((ASSET / "published_prompts.json").read_text())
    splits = {
        "ĠDescribe": ["ĠDesc", "ribe"],
        "Ġvqa": ["Ġv", "qa"],
        "ĠRÃ©pondez": ["ĠR", "Ã©p", "onde", "z"],
        "Ġnewline": ["Ġnew", "line"],
    }
    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary, spaces = dict(table["special"]), {"   ": 50275}
    for prompt in table["prompts"]:
        text = prompt["formatted"]
        parts = [part for chunk in text.split("   ") for part in (*before.pre_tokenize_str(chunk), ("   ", None))][:-1]
        pieces = [piece for part, _ in parts for piece in splits.get(part, [part])]
        assert len(pieces) == len(prompt["ids"]), text
        vocabulary |= dict(zip(pieces, prompt["ids"], strict=True))
    merges = []
    for piece in itertools.chain(*splits.values()):
        merges += [(piece[:end], piece[end]) for end in range(1, len(piece))]
    spare = itertools.count(2)
    for letters in (*pre_tokenizers.ByteLevel.alphabet(), *(left + right for left, right in merges)):
        if letters not in vocabulary:
            vocabulary[letters] = next(number for number in spare if number not in vocabulary.values())
    made = Tokenizer(models.BPE({**vocabulary, **spaces}, merges, ignore_merges=True))
    made.normalizer, made.pre_tokenizer = normalizers.NFC(), before
    made.add_special_tokens([AddedToken(token, normalized=False) for token in table["special"]])
    made.add_tokens([AddedToken(token, normalized=False) for token in spaces])
    return made
