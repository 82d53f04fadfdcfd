"""What torch's CPU allocator really hands out, for tests of memory plans and traces."""

import gc

from torch.profiler import ProfilerActivity, profile


def peak_allocated(function):
    """Peak bytes that the allocator hands out while `function` runs."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = profiled.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    current = peak = 0
    for _, size in sizes:
        current += size
        peak = max(peak, current)
    return peak
