"""A function that hangs is stopped, whatever it hangs in, and its rewards are missing rather than zero."""

import asyncio
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupwise.rewards.call import call_rewards
from groupwise.rewards.time_limit import with_time_limit

LIMIT = 0.2


def in_another_thread(call):
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(call).result()


def loops(prompts, completions):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass


def swallows(prompts, completions):
    try:
        time.sleep(20)
    except Exception:  # noqa: BLE001 - as careless reward functions do
        return [0.0]
    return [0.0]


def swallows_all(prompts, completions):
    try:
        time.sleep(20)
    except:  # noqa: E722
        return [0.0]
    return [0.0]


def never_ending_pattern(prompts, completions):
    re.search(r"(a+)+$", "a" * 40 + "b")


async def waits(prompts, completions):
    await asyncio.sleep(20)


@pytest.mark.parametrize("function", [loops, swallows, swallows_all, never_ending_pattern, waits])
def test_what_hangs_is_missing_with_the_reason(function):
    begun = time.monotonic()
    terms = call_rewards({"r": with_time_limit(function, LIMIT)}, ["p"], ["c"])
    assert time.monotonic() - begun < 10
    assert terms.per_rollout["r"].isnan().all()
    assert "TimeoutError: it took longer than 0.2 s" in terms.failures["r"]


def test_outside_the_main_thread_too():
    with pytest.raises(TimeoutError, match=r"longer than 0\.2 s"):
        in_another_thread(with_time_limit(lambda: time.sleep(5), LIMIT))


@pytest.mark.parametrize("run", [lambda call: call(), in_another_thread])
def test_what_is_in_time_comes_through_and_so_does_what_it_raises(run):
    assert run(lambda: with_time_limit(lambda a, b: a + b, 5)(1, b=2)) == 3
    with pytest.raises(ZeroDivisionError):
        run(with_time_limit(lambda: 1 / 0, 5))


@pytest.mark.parametrize("others", [0, 30])
def test_the_alarm_is_switched_off_afterwards_and_another_one_goes_on(others):
    handler = signal.getsignal(signal.SIGALRM)
    pytests_own = signal.setitimer(signal.ITIMER_REAL, others)
    try:
        with_time_limit(lambda: None, LIMIT)()
        time.sleep(2 * LIMIT)
        assert signal.getsignal(signal.SIGALRM) is handler
        left = signal.getitimer(signal.ITIMER_REAL)[0]
        assert 0 < left < 30 if others else left == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *pytests_own)


def test_an_async_function_in_time_is_awaited():
    async def soon(prompts, completions):
        await asyncio.sleep(0.01)
        return [3.0]

    assert call_rewards({"r": with_time_limit(soon, 5)}, ["p"], ["c"]).per_rollout["r"].tolist() == [3.0]


def test_a_limit_that_is_over_as_the_call_ends_raises_nothing_else():
    """The alarm may come at any line after the function has returned."""
    limit, outcomes = 5e-4, set()

    def ends_in_time_or_not():
        end = time.perf_counter() + limit * 0.98
        while time.perf_counter() < end:
            pass
        return "result"

    for _ in range(1000):
        try:
            outcomes.add(with_time_limit(ends_in_time_or_not, limit)())
        except TimeoutError:
            outcomes.add("over")
    assert outcomes <= {"result", "over"}
