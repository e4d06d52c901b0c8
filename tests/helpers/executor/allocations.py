"""What PyTorch's allocator of the CPU gives out: where Triton's interpreter stands for a GPU, its memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Taken:
    """Bytes that work took and has not given back, and the most that it took at once."""

    kept: int
    most: int

    @property
    def given_back(self) -> int:
        """What it had at its height beside what is kept: as `gpu.measuring.peak_bytes_of` measures on a GPU."""
        return self.most - self.kept


def taken_by(work: Callable[[], object]) -> Taken:
    """Do the work and collect its garbage; the result is kept until all is counted."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
        gc.collect()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    totals = list(accumulate((size for _, size in changes), initial=0))
    del result
    return Taken(totals[-1], max(totals))
