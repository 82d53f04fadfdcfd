"""Shapes in annotations are checked while the tests run; threads are fixed so that timings mean something.

The cache folder is empty and the tests' own."""

import importlib
import os
import tempfile

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # some virtual machines announce AMX and refuse it

import hypothesis
import torch
from jaxtyping import install_import_hook

SHAPED = [f"groupwise.core.{name}" for name in ("advantage", "groups", "loss", "placement", "reward")]

with install_import_hook(SHAPED, "beartype.beartype"):
    for module in SHAPED:
        importlib.import_module(module)

torch.set_num_threads(1)
_cache = tempfile.TemporaryDirectory(prefix="groupwise-cache-")
os.environ["GROUPWISE_CACHE"] = _cache.name
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("steady")
