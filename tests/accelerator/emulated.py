"""Builds the emulated accelerator (once) and registers it with torch as the device "emulated" of this process.

Registration cannot be undone and changes what `torch.accelerator` reports, so tests use it in processes of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

NAME = "emulated"
SOURCE = Path(__file__).with_name("device.cpp")
TOOLS = ("g++", "ninja")


def missing_tools() -> list[str]:
    """What is needed to build the device and is not on this machine."""
    python_header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return missing + ([] if python_header.is_file() else [str(python_header)])


def build_folder() -> Path:
    """One folder for each source, torch and Python, so that a build is never of another one."""
    known_by = f"{SOURCE.read_text()} {torch.__version__} {sysconfig.get_config_var('SOABI')}"
    root = os.environ.get("GROUPWISE_BUILD_DIR", Path(tempfile.gettempdir()) / f"groupwise-device-{os.getuid()}")
    return Path(root) / hashlib.sha256(known_by.encode()).hexdigest()[:16]


def build() -> Any:
    """The extension module; compiled at the first call on a machine (about a minute of one core)."""
    from torch.utils import cpp_extension

    folder = build_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "build.lock"):
        (folder / "lock").unlink(missing_ok=True)  # torch's own lock, which a build that was killed leaves behind
        return cpp_extension.load(
            "groupwise_emulated", [str(SOURCE)], build_directory=str(folder), extra_cflags=["-O1", "-w"]
        )


@cache
def register() -> Any:
    """Register the device; the module has counters(), reset_counters(), set_memory_limit(), lose_after(), on_sync()."""
    device = build()
    device.register_hooks()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(device))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return device


def _device_module(device: Any) -> types.ModuleType:
    """What torch and its users look up as `torch.emulated`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = (lambda: 1), (lambda: 0)
    module.set_device = lambda index: None
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.host_syncs = lambda: device.counters()["host_syncs"]
    return module
