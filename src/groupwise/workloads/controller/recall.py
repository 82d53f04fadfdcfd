"""The executor with a memory: what is known is not computed again."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.workloads.controller.answers import Answers
from groupwise.workloads.controller.executor import Executor, Prefix, Request


def recall(
    executor: Executor,
    answers: Answers,
    requests: Sequence[Request],
    *,
    prefix: Prefix | None = None,
    max_new_tokens: int = 1,
    stop_token: int | None = None,
) -> list[tuple[int, ...]]:
    """Tokens for every request, in order; new ones are computed together and remembered.

    Those that a prefix pass has begun go on from there. `answers` belongs to one model and one way to stop: its name
    should tell both.
    """
    keys = [(request.sample.name, request.knobs) for request in requests]
    known = answers.known(keys)
    missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
    begun = {key for key, request in missing.items() if prefix is not None and request.head in prefix.latency_tokens}
    for start, part in ((prefix, begun), (None, missing.keys() - begun)):
        asked = {key: request for key, request in missing.items() if key in part}
        if asked:
            found, _ = executor.answer(
                list(asked.values()), prefix=start, max_new_tokens=max_new_tokens, stop_token=stop_token
            )
            new = {key: answer.tokens for key, answer in zip(asked, found, strict=True)}
            answers.remember(new)
            known |= new
    return [known[key] for key in keys]
