"""`groupwise export RUN FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from safetensors import SafetensorError

from groupwise.cli.arguments import parse, print_json, quiet_stdout
from groupwise.core.errors import UserError
from groupwise.core.io.files import read_json
from groupwise.workloads.checkpoint_files import has_ema, newest_valid_checkpoint


@dataclass(frozen=True)
class ExportArguments:
    """Write what a run trained as a folder that transformers or diffusers load, from whole or sharded checkpoints.

    Try: groupwise export runs/chat my-model
    """

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/chat."""
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Where to write: a folder that is not there yet, or an empty one."""
    adapter: bool = False
    """Write a LoRA adapter alone. Otherwise it is merged into the weights."""
    weights: Literal["auto", "trained", "averaged"] = "auto"
    """Weights of the last update, or their moving average; auto takes the average where the run kept one."""


def run(arguments: list[str], as_json: bool) -> int:
    options = parse(ExportArguments, arguments, prog="groupwise export")
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        raise UserError(f"{options.folder} is not empty. Name a new folder, so that nothing is overwritten.")
    checkpoint = newest_valid_checkpoint(options.run_dir / "checkpoints", _warn)
    if checkpoint is None:
        raise UserError(f"{options.run_dir} holds no checkpoint. Name the folder of a run, such as runs/chat.")
    if options.weights == "averaged" and not has_ema(checkpoint):
        raise UserError(
            f"{checkpoint} has no averaged weights: its run had no --optimizer.ema-decay. Take --weights trained."
        )
    with quiet_stdout(as_json), _named_errors(options.folder):
        kind = _export(options, checkpoint)
    num_bytes = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    if as_json:
        print_json({"folder": str(options.folder), "kind": kind, "checkpoint": checkpoint.name, "bytes": num_bytes})
    else:
        print(f"{options.folder}: {kind} of {checkpoint.name} ({num_bytes / 2**20:.1f} MiB).")
    return 0


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """What libraries raise where they cannot write, as a sentence."""
    try:
        str(folder).encode()
        yield
    except UnicodeEncodeError as error:
        raise UserError(f"{folder} is not Unicode, which the libraries that write it need. Name another.") from error
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder} cannot be written ({reason}). What is in it is not complete: delete it, and name another place."
        ) from error


def _export(options: ExportArguments, checkpoint: Path) -> str:
    """Writes the folder; returns what it holds."""
    workload = read_json(options.run_dir / "config.json").get("workload")
    settings = workload if isinstance(workload, dict) else {}
    averaged = has_ema(checkpoint) and options.weights != "trained"
    if isinstance(settings.get("policy"), dict):
        from groupwise.workloads.chat.build import export as export_chat

        export_chat(options.run_dir, options.folder, adapter=options.adapter, ema=averaged, checkpoint=checkpoint)
        return "a language model's adapter" if options.adapter else "a language model"
    if settings.get("pipeline"):
        from groupwise.workloads.flow.export import export as export_flow

        merge = not options.adapter
        export_flow(options.run_dir, options.folder, ema=averaged, merge=merge, checkpoint=checkpoint)
        return "a pipeline's adapter" if options.adapter else "a pipeline's transformer"
    if (checkpoint / "config.json").is_file():
        from groupwise.workloads.controller.serving.adaptive import AdaptiveModel

        AdaptiveModel.load(options.run_dir).save_pretrained(options.folder)
        return "a controller"
    raise UserError(
        f"The run in {options.run_dir} is of a workload that has no export: there is one for language models, pipelines"
        " of diffusers and controllers. Its weights are in policy.safetensors of a checkpoint."
    )


def _warn(text: str) -> None:
    print(f"Warning: {text}", file=sys.stderr)
