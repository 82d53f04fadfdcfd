"""Into how many pieces the work is cut at present: memory, not results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def own_name(stage: str) -> str:
    """What a workload's own number for a stage is called; reward_rows are those that rewards() gets in one call."""
    return "rows_per_reward_pass" if stage == "reward" else f"{stage}_rows"


@dataclass
class Cut:
    """Rows that are taken at a time. Begins as configured; lowered when memory runs out, on all ranks alike."""

    rows_per_pass: int
    reward_rows: int | None = None
    """Rows judged at a time, in whole groups; None for all that a rank has."""
    stage_rows: Mapping[str, int] = field(default_factory=dict)
    """The workload's own numbers, where they were lowered."""
    shrunk: Mapping[str, int] = field(default_factory=dict)
    """What had to become smaller at one row, as the user allowed: this does change the result."""
    lowered: list[tuple[str, int]] = field(default_factory=list)
    """What was lowered and from where, in order: the way back."""
    quiet: int = 0
    """Steps since memory last ran out."""
    shortages: int = 0
    """How often it ran out in this run."""

    def rows(self) -> dict[str, int]:
        """The numbers in force, by the names they are shown under."""
        own = {own_name(stage): rows for stage, rows in self.stage_rows.items()}
        judged = {"reward_rows": self.reward_rows} if self.reward_rows else {}
        return {"rows_per_pass": self.rows_per_pass, **judged, **own, **self.shrunk}
