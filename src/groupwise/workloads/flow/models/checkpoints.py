"""Weights of a Wan transformer with camera layers in files: by diffusers' names and by those of the original code.

ReCamMaster publishes its whole transformer under the original names of Wan, as a .ckpt; what is trained here is written
under diffusers' names. Both are read, the map of names goes both ways, and reading executes nothing from a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from groupwise.core.errors import UserError, is_out_of_memory
from groupwise.core.io.files import open_regular
from groupwise.dist.deferred_weights import defer_tensors
from groupwise.workloads.checkpoint_files import WEIGHTS, is_in_parts
from groupwise.workloads.checkpoint_files import read_weights as checkpoint_weights
from groupwise.workloads.flow.models.camera_layers import camera_weights

_PARTS = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.modulation": "scale_shift_table",
    "head.head": "proj_out",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_ATTENTION |= {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
_BLOCK = {
    **{f"self_attn.{name}": f"attn1.{ours}" for name, ours in _ATTENTION.items()},
    **{f"cross_attn.{name}": f"attn2.{ours}" for name, ours in _ATTENTION.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
    "cam_encoder": "attn1.processor.pose_encoder",
    "projector": "attn1.processor.projector",
}
_IN_BLOCK = re.compile(r"(blocks\.\d+\.)(.+)")
_TENSOR = re.compile(r"(.*?)(\.weight|\.bias)?", re.DOTALL)


def diffusers_name(original: str) -> str | None:
    """Diffusers' name of a weight of the original code; None where there is none."""
    return _translated(original, _PARTS, _BLOCK)


def original_name(name: str) -> str | None:
    """The original code's name of a weight of diffusers."""
    return _translated(name, _inverse(_PARTS), _inverse(_BLOCK))


def _translated(name: str, parts: Mapping[str, str], block: Mapping[str, str]) -> str | None:
    in_block = _IN_BLOCK.fullmatch(name)
    prefix, rest = in_block.groups() if in_block else ("", name)
    tensor = _TENSOR.fullmatch(rest)
    assert tensor is not None
    translated = (block if in_block else parts).get(tensor[1])
    return f"{prefix}{translated}{tensor[2] or ''}" if translated else None


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {ours: original for original, ours in names.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .ckpt, .pt or .pth that holds nothing but tensors by name."""
    open_regular(path, follow_links=True).close()
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's reader raises whatever a damaged file leads it to
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{path} cannot be read as weights ({' '.join(str(error).split())[:200]}). Give a .safetensors file, or a"
            " .ckpt of tensors by name; code in a file is never executed."
        ) from error
    if not isinstance(content, Mapping) or not all(_is_weight(*entry) for entry in content.items()):
        raise UserError(f"{path} does not hold tensors by name. Save the transformer's state_dict() alone.")
    return dict(content)


def _is_weight(name: Any, weight: Any) -> bool:
    """Whether an entry is a tensor of numbers that are in the file; torch saves sparse and meta tensors too."""
    known = isinstance(name, str) and isinstance(weight, Tensor)
    return known and weight.layout is torch.strided and not (weight.is_meta or weight.is_quantized or weight.is_nested)


def load_camera_layers(transformer: WanTransformer3DModel, path: Path) -> None:
    """Load camera layers, and whatever else of the transformer a file holds, by diffusers' or the original names.

    `path` may be a checkpoint folder of a run that trained them; that of an adapter is refused.
    """
    if path.is_dir() and is_in_parts(path):
        weights = dict(checkpoint_weights(path, ema=False))
    else:
        path = path / WEIGHTS if path.is_dir() else path
        weights = read_weights(path)
    saved = _by_diffusers_names(weights)
    _check_names(transformer, saved, path)
    own = {**dict(transformer.named_parameters()), **dict(transformer.named_buffers())}
    with torch.no_grad():
        for name, weight in saved.items():
            if weight.shape != own[name].shape:
                raise UserError(
                    f"'{name}' of {path} is {list(weight.shape)}, and the transformer's is {list(own[name].shape)}:"
                    " it was saved from a model of another size. Take the pipeline that it was trained on."
                )
            if own[name].is_meta:
                defer_tensors(transformer, {name: weight})
            else:
                own[name].copy_(weight)


def original_state(transformer: WanTransformer3DModel) -> dict[str, Tensor]:
    """All weights under the names of the original code, which ReCamMaster's own inference loads."""
    weights = {}
    for name, weight in transformer.named_parameters():
        original = original_name(name)
        if original is None:
            raise UserError(f"'{name}' has no name in the original code of Wan. Merge the adapter first.")
        weights[original] = weight.detach().cpu().contiguous()
    return weights


def _by_diffusers_names(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {diffusers_name(name) or name: weight for name, weight in saved.items()}


def _check_names(transformer: WanTransformer3DModel, saved: Mapping[str, Tensor], path: Path) -> None:
    own = {name for name, _ in transformer.named_parameters()} | {name for name, _ in transformer.named_buffers()}
    if any(".lora_" in name for name in saved):
        raise UserError(
            f"{path} holds a LoRA adapter, not camera layers. `groupwise export RUN FOLDER` merges it into the model:"
            " give the recam.ckpt that it writes."
        )
    missing = sorted(camera_weights(transformer).keys() - saved.keys())
    unknown = sorted(saved.keys() - own)
    if missing or unknown:
        what = f"lacks '{missing[0]}'" if missing else f"holds '{unknown[0]}', which this transformer has not"
        raise UserError(
            f"{path} does not hold the camera layers of this transformer: it {what}. Give a checkpoint of ReCamMaster,"
            " one of a run that trained camera layers, or the weights by the names of either."
        )
