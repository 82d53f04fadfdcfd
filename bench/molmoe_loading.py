"""Host memory while a MolmoE folder of several GB is loaded: its peak beside the size of the files.

    python bench/molmoe_loading.py --gib 4

The folder is made in a temporary directory, in shards of about one GiB, and each load is measured in a process of its
own. The size is that of the experts: all else is as small as it can be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from groupwise.workloads.controller.model.molmoe.sizes import (
    PUBLISHED_FIELDS,
    PUBLISHED_VISION_FIELDS,
    read_sizes,
    tensor_shapes,
)

GIB = 1 << 30
WIDTH, EXPERTS, HEAD_ROWS = 1024, 64, 8192
SHARD_BYTES = GIB
LOAD = """
import sys, threading, time, resource, torch
torch.set_num_threads(1)
from groupwise.workloads.controller.model.load import load_model

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

load_model  # what importing takes is counted before
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.02):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
model = load_model(sys.argv[1], dtype=getattr(torch, sys.argv[2]), device="cpu").model
seconds = time.perf_counter() - start
done.set()
watcher.join()
weights = sum(weight.nbytes for weight in model.parameters())
print(weights, max(peak, anonymous()) - before, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the files")
    gib = parser.parse_args().gib
    with tempfile.TemporaryDirectory() as made:
        files = write_folder(Path(made), int(gib * GIB))
        print(f"files {files / GIB:.2f} GiB in float32")
        for dtype in ("float32", "bfloat16"):
            printed = subprocess.run(
                [sys.executable, "-c", LOAD, made, dtype], capture_output=True, text=True, check=True
            ).stdout.split()
            weights, peak, resident = (int(number) / GIB for number in printed[:3])
            print(
                f"{dtype}: weights {weights:.3f} GiB; peak above the imports {peak:.3f} GiB, {peak / weights:.3f} of"
                f" the weights and {peak * GIB / files:.3f} of the files; largest resident set {resident:.3f} GiB;"
                f" {float(printed[3]):.0f} s"
            )


def write_folder(folder: Path, size: int) -> int:
    """A folder of about this many bytes; returns the bytes of its weights."""
    blocks = max(1, round(size / (4 * EXPERTS * 3 * WIDTH * WIDTH // 2)))
    config = {
        **PUBLISHED_FIELDS,
        "model_type": "molmo",
        "block_type": "moe",
        "d_model": WIDTH,
        "n_layers": blocks,
        "n_heads": 8,
        "mlp_ratio": 1,
        "moe_num_experts": EXPERTS,
        "moe_top_k": 8,
        "vocab_size": HEAD_ROWS - 24,
        "embedding_size": HEAD_ROWS,
        "additional_vocab_size": 128,
        "vit_layers": [-2],
        "vision_backbone": {
            **PUBLISHED_VISION_FIELDS,
            "image_emb_dim": 32,
            "image_num_layers": 3,
            "image_num_heads": 2,
            "image_mlp_dim": 64,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes, written, weight_map = tensor_shapes(read_sizes(config, "made")), 0, {}
    for number, names in enumerate(_shards(shapes)):
        file = f"model-{number + 1:05d}.safetensors"
        written += _write_shard(folder / file, {name: shapes[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return written


def _shards(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names, size = [], 0
    for name, shape in shapes.items():
        names.append(name)
        size += 4 * prod(shape)
        if size >= SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


def _write_shard(file: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """The same normal numbers again and again."""
    import numpy as np

    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + 4 * prod(shape)]}
        end += 4 * prod(shape)
    raw, noise = json.dumps(header).encode(), np.random.default_rng(0).normal(size=1 << 20).astype(np.float32).tobytes()
    with file.open("wb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for start in range(0, end, len(noise)):
            opened.write(noise[: end - start])
    return file.stat().st_size


if __name__ == "__main__":
    main()
