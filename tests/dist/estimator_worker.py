"""`auto` on two ranks: one profiles for both; and where the second one fails before, neither waits for the other.

torchrun ... estimator_worker.py MODEL_FOLDER OUTPUT_FOLDER       (what each rank got, and what it raised)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from groupwise.core.errors import UserError
from groupwise.dist.comm import Comm, connect, disconnect, exit_now
from groupwise.latency.estimator import LatencyEstimator
from groupwise.workloads.controller.latency import source
from groupwise.workloads.controller.latency.estimates import KnobLatencyEstimator
from groupwise.workloads.controller.model.load import LoadedModel, load_model
from groupwise.workloads.controller.serving.server import ServedTimer


def load(comm: Comm, loaded: LoadedModel, failing_rank: int | None) -> LatencyEstimator:
    with comm.fail_together("build()"):
        if comm.rank == failing_rank:
            raise UserError("this rank has no questions")
        known = source.load_estimator("auto", loaded, new_tokens=1, timer_for=ServedTimer)
    assert isinstance(known, KnobLatencyEstimator)
    return known.estimator


def main(model: Path, output: Path) -> None:
    source.AUTO_SECONDS = 1.0
    comm, loaded = connect(timeout_s=60), load_model(model)
    first, second = (load(comm, loaded, None).coefficients for _ in range(2))
    try:
        load(comm, loaded, failing_rank=1)
        error = ""
    except UserError as raised:
        error = str(raised)
    found = {"coefficients": [first, second], "error": error}
    (output / f"rank-{comm.rank}.json").write_text(json.dumps(found))
    disconnect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    exit_now()
