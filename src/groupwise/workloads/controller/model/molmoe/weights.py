"""MolmoE's published safetensors into its modules: file by file, in the dtype asked for, without a second copy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.olmoe.modeling_olmoe import OlmoeRotaryEmbedding

from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.workloads.controller.model.molmoe.modeling import MolmoeConfig, MolmoeForConditionalGeneration
from groupwise.workloads.controller.model.molmoe.sizes import PATCH_SIDE, MolmoeSizes, tensor_shapes, vision_block

FindFile = Callable[[str], Path | None]
"""A file of the model by its name; None if it has none of that name."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20
_FETCH = "Fetch this file again."


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Of its bytes, from the beginning of the file."""


def load_weights(
    sizes: MolmoeSizes,
    config: MolmoeConfig,
    find_file: FindFile,
    *,
    source: str,
    dtype: torch.dtype | str,
    device: torch.device | str,
) -> MolmoeForConditionalGeneration:
    """All headers are checked before any weight is read. `dtype` "auto" is the one that the head is stored in."""
    stored = [tensor for file in weight_files(find_file, source) for tensor in read_header(file)]
    by_name = {tensor.name: tensor for tensor in stored}
    check_tensors({name: tensor.shape for name, tensor in by_name.items()}, sizes, source)
    kept = by_name["lm_head.weight"].dtype if isinstance(dtype, str) else dtype
    model = _without_weights(config, kept, device)
    destinations = _destinations(model, sizes)
    for file, tensors in groupby(sorted(by_name.values(), key=attrgetter("file", "start")), attrgetter("file")):
        with file.open("rb", buffering=0) as opened:
            for tensor in tensors:
                _copy(opened, tensor, destinations[tensor.name])
    return model.eval()


def weight_files(find_file: FindFile, source: str) -> list[Path]:
    """One file, or those that an index names."""
    index = find_file(_INDEX)
    if index is None:
        single = find_file(_SINGLE)
        if single is None:
            raise _no_safetensors(find_file, source)
        return [single]
    files = {name: find_file(name) for name in sorted(set(_weight_map(index).values()))}
    missing = [name for name, file in files.items() if file is None]
    if missing:
        raise UserError(
            f"{source} lacks {len(missing)} of its {len(files)} files of weights, {missing[0]} among them, which"
            f" {_INDEX} names. Fetch all files of the model again."
        )
    return [file for file in files.values() if file is not None]


def _weight_map(index: Path) -> Mapping[str, str]:
    names = read_json(index, follow_links=True).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} has no weight_map from tensors to files. {_FETCH}")
    return names


def _no_safetensors(find_file: FindFile, source: str) -> UserError:
    if any(find_file(name) for name in _PICKLES):
        return UserError(
            f"{source} has its weights in .bin files, which are pickles: loading one may run any code, so they are not"
            " read. Fetch the safetensors files of the model, or convert them on a machine that you would lose."
        )
    return UserError(f"{source} holds no weights: neither {_SINGLE} nor {_INDEX}. Fetch all files of the model again.")


def read_header(file: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file: 8 bytes with the header's length, the header as JSON, the numbers."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise UserError(f"{file} is cut off or no safetensors file: it has {size:,} bytes. {_FETCH}")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            entries = [(name, _entry(entry)) for name, entry in header.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} has a damaged header ({error!r}). {_FETCH}") from error
    for name, (dtype, shape, start, end) in entries:
        if dtype not in _DTYPES or end - start != prod(shape) * _DTYPES[dtype].itemsize:
            raise UserError(
                f"{file} stores {name} as {dtype} of shape {list(shape)} in {end - start:,} bytes: it must be one of"
                f" {', '.join(_DTYPES)} and take as many bytes as its numbers. {_FETCH}"
            )
        if 8 + length + end > size:
            raise UserError(
                f"{file} is cut off: {name} ends at byte {8 + length + end:,}, and the file has {size:,} bytes."
                f" {_FETCH}"
            )
        yield StoredTensor(name, file, _DTYPES[dtype], shape, 8 + length + start)


def _entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    start, end = (int(offset) for offset in entry["data_offsets"])
    return str(entry["dtype"]), tuple(int(side) for side in entry["shape"]), start, end


def check_tensors(stored: Mapping[str, tuple[int, ...]], sizes: MolmoeSizes, source: str) -> None:
    """Refuse files that do not hold exactly the tensors that config.json implies."""
    expected = tensor_shapes(sizes)
    missing, unknown = (
        [name for name in expected if name not in stored],
        [name for name in stored if name not in expected],
    )
    if missing:
        raise UserError(
            f"{source} lacks {len(missing):,} of {len(expected):,} weights, {missing[0]} among them: they would be"
            " random. Fetch all files of the model again; a checkpoint of the training code has other names and must be"
            " converted first."
        )
    if unknown:
        raise UserError(
            f"{source} holds {len(unknown):,} weights that MolmoE as published does not have, {unknown[0]} among them:"
            " without them it would answer differently. Take the published folder."
        )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise UserError(
                f"{name} in {source} has shape {list(stored[name])}, and {list(shape)} by its config.json. Weights and"
                " config.json must come from the same model."
            )


def _without_weights(
    config: MolmoeConfig, dtype: torch.dtype, device: torch.device | str
) -> MolmoeForConditionalGeneration:
    """The modules with memory for their weights, which is not written to yet. Only buffers that are not stored have
    their values."""
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration._from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.requires_grad_(False)
    text, embeddings = model.model.language_model, model.model.vision_tower.embeddings
    text.rotary_emb = OlmoeRotaryEmbedding(config.text_config).to(device)
    embeddings.position_ids = torch.arange(embeddings.num_positions, device=device)[None]
    return model


@torch.no_grad()
def _copy(opened: Any, tensor: StoredTensor, destinations: Sequence[Tensor]) -> None:
    """Chunk by chunk of whole rows, so that what is read needs little memory besides the destinations."""
    opened.seek(tensor.start)
    row_bytes = prod(tensor.shape[1:]) * tensor.dtype.itemsize
    rows_per_chunk = max(1, _CHUNK_BYTES // row_bytes)
    for destination in destinations:
        for rows in destination.split(rows_per_chunk):
            buffer = bytearray(len(rows) * row_bytes)
            if _read_into(opened, buffer) < len(buffer):
                raise UserError(f"{tensor.file} ended while {tensor.name} was read. {_FETCH}")
            rows.copy_(torch.frombuffer(buffer, dtype=tensor.dtype).view(rows.shape))


def _read_into(opened: Any, buffer: bytearray) -> int:
    """The number of bytes read; one call may read fewer than there are."""
    view, done = memoryview(buffer), 0
    while done < len(view) and (count := opened.readinto(view[done:])):
        done += count
    return done


def _destinations(model: MolmoeForConditionalGeneration, sizes: MolmoeSizes) -> dict[str, Sequence[Tensor]]:
    """Where the rows of each published tensor go, one view after the other; nowhere for blocks that nothing reads."""
    text, rows = model.model.language_model, sizes.head_rows
    embedding = text.embed_tokens.weight.data
    places: dict[str, Sequence[Tensor]] = {
        "model.transformer.wte.embedding": [embedding[:rows]],
        "model.transformer.wte.new_embedding": [embedding[rows:]],
        "model.transformer.ln_f.weight": [text.norm.weight.data],
        "lm_head.weight": [model.lm_head.weight.data],
    }
    for index, block in enumerate(text.layers):
        places.update(_text_block(f"model.transformer.blocks.{index}", block, sizes.expert_width))
    places.update(_vision_tower("model.vision_backbone.image_vit", model.model.vision_tower))
    places.update(_connector("model.vision_backbone", model.model.connector))
    unread = [name for name in tensor_shapes(sizes) if vision_block(name) >= sizes.vision.blocks_run]
    return places | dict.fromkeys(unread, ())


def _text_block(prefix: str, block: Any, expert_width: int) -> Iterator[tuple[str, Sequence[Tensor]]]:
    attention, experts = block.self_attn, block.mlp.experts
    yield f"{prefix}.attn.attn_norm.weight", [block.input_layernorm.weight.data]
    yield f"{prefix}.attn.q_norm.weight", [attention.q_norm.weight.data]
    yield f"{prefix}.attn.k_norm.weight", [attention.k_norm.weight.data]
    joined = [linear.weight.data for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    yield f"{prefix}.attn.att_proj.weight", joined
    yield f"{prefix}.attn.attn_out.weight", [attention.o_proj.weight.data]
    yield f"{prefix}.mlp.ff_norm.weight", [block.post_attention_layernorm.weight.data]
    yield f"{prefix}.mlp.gate.weight", [block.mlp.gate.weight.data]
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True)):
        inside = f"{prefix}.mlp.experts.{expert}"
        yield f"{inside}.gate_proj.weight", [gate_up[:expert_width]]
        yield f"{inside}.up_proj.weight", [gate_up[expert_width:]]
        yield f"{inside}.down_proj.weight", [down]


def _vision_tower(prefix: str, tower: Any) -> Iterator[tuple[str, Sequence[Tensor]]]:
    embeddings = tower.embeddings
    yield f"{prefix}.class_embedding", [embeddings.class_embedding.data]
    yield f"{prefix}.positional_embedding", [embeddings.position_embedding.weight.data]
    # stored by row, column and color of a pixel
    patches = embeddings.patch_embedding.weight.data.permute(0, 2, 3, 1)
    assert patches.shape[1:3] == (PATCH_SIDE, PATCH_SIDE)
    yield f"{prefix}.patch_embedding.weight", [patches]
    yield from _linear(f"{prefix}.pre_ln", tower.pre_layrnorm)
    for index, block in enumerate(tower.encoder.layers):
        inside, attention = f"{prefix}.transformer.resblocks.{index}", block.self_attn
        yield from _linear(f"{inside}.attention.wq", attention.q_proj)
        yield from _linear(f"{inside}.attention.wk", attention.k_proj)
        yield from _linear(f"{inside}.attention.wv", attention.v_proj)
        yield from _linear(f"{inside}.attention.wo", attention.out_proj)
        yield from _linear(f"{inside}.feed_forward.w1", block.mlp.fc1)
        yield from _linear(f"{inside}.feed_forward.w2", block.mlp.fc2)
        yield from _linear(f"{inside}.attention_norm", block.layer_norm1)
        yield from _linear(f"{inside}.ffn_norm", block.layer_norm2)


def _connector(prefix: str, connector: Any) -> Iterator[tuple[str, Sequence[Tensor]]]:
    pooling, projector = f"{prefix}.image_pooling_2d", f"{prefix}.image_projector"
    yield f"{prefix}.pad_embed", [connector.pad_embed.data]
    for name, linear in (("wq", "query"), ("wk", "key"), ("wv", "value"), ("wo", "output")):
        yield from _linear(f"{pooling}.{name}", getattr(connector, linear))
    for name, linear in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        yield f"{projector}.{name}.weight", [getattr(connector, linear).weight.data]


def _linear(name: str, module: nn.Module) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """A layer or a norm with a bias."""
    for part, weight in module.named_parameters():
        yield f"{name}.{part}", [weight.data]
