"""The executor with a memory: what is known is not computed again."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.executor import Executor, Request


def recall(
    executor: Executor,
    answers: Answers,
    requests: Sequence[Request],
    *,
    max_new_tokens: int = 1,
    stop_token: int | None = None,
) -> list[tuple[int, ...]]:
    """Tokens for every request, in order; new ones are computed together and remembered.

    `answers` belongs to one model and one way to stop: its name should tell both.
    """
    keys = [(request.sample.name, request.knobs) for request in requests]
    known = answers.known(keys)
    missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
    if missing:
        found, _ = executor.answer(list(missing.values()), max_new_tokens=max_new_tokens, stop_token=stop_token)
        new = {key: answer.tokens for key, answer in zip(missing, found, strict=True)}
        answers.remember(new)
        known |= new
    return [known[key] for key in keys]
