"""Evaluation sets that are small enough to fill in by hand."""

from types import SimpleNamespace

import torch

from groupwise.workloads.controller.evaluate.exact import Candidate, EvaluationSet

MEDIAN_MS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
OWN_ORDER, OTHER_ORDER = (3, 2), (2, 3)


def evaluation_set(types, accuracy, budgets=(2.5, 9.0), upper=1.1, pictures=None):
    """Configurations of 1 to 4 ms; further candidates are the same ones in another drop order. Each question has the
    same budgets; its type is its first word."""
    pictures = pictures or [f"picture {index}" for index in range(len(types))]
    questions = [
        SimpleNamespace(question_type=name, text=f"{name.upper()} word", image=picture)
        for name, picture in zip(types, pictures, strict=True)
    ]
    conditions = SimpleNamespace(
        questions=questions, budget_ms=torch.tensor(budgets, dtype=torch.float64).repeat(len(types))
    )
    accuracy = torch.tensor(accuracy, dtype=torch.float64)
    candidates = [Candidate(index % 4, OTHER_ORDER if index >= 4 else OWN_ORDER) for index in range(accuracy.shape[1])]
    medians = MEDIAN_MS[[candidate.configuration for candidate in candidates]].expand(len(types), -1)
    return EvaluationSet(conditions, candidates, accuracy, medians, upper * medians)
