"""Records which requests of a run had a length truncated, while its schedule is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cadenza_loadtest.requests import Ints, RequestShape


@dataclass(slots=True)
class Truncations:
    """The requests of a schedule that had a length truncated."""

    prompts: set[int] = field(default_factory=set)
    """Indices of requests with a truncated prompt; `outputs` likewise."""
    outputs: set[int] = field(default_factory=set)

    def recording(self, schedule: Iterable[tuple[float, RequestShape]]) -> Iterator[tuple[float, RequestShape]]:
        """The same schedule, read lazily; truncations are recorded as it is read."""
        for due_s, shape in schedule:
            if shape.prompt_truncated:
                self.prompts.add(shape.index)
            if shape.output_truncated:
                self.outputs.add(shape.index)
            yield due_s, shape

    def count_among(self, index: Ints) -> tuple[int, int]:
        """Number of truncated prompts and of truncated outputs among the requests with these indices [n]."""
        prompts, outputs = (int(np.isin(index, list(cut)).sum()) for cut in (self.prompts, self.outputs))
        return prompts, outputs
