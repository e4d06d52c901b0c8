"""Requests whose lengths were cut to what fits together: how many of a run, counted as its schedule passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cadenza.loadtest.requests import Ints, RequestShape


@dataclass(slots=True)
class Truncations:
    """Which requests of a schedule were cut; only those are kept."""

    prompts: set[int] = field(default_factory=set)
    """By index."""
    outputs: set[int] = field(default_factory=set)

    def recording(self, schedule: Iterable[tuple[float, RequestShape]]) -> Iterator[tuple[float, RequestShape]]:
        """The same schedule, read as it is needed; what passes is noted."""
        for due_s, shape in schedule:
            if shape.prompt_truncated:
                self.prompts.add(shape.index)
            if shape.output_truncated:
                self.outputs.add(shape.index)
            yield due_s, shape

    def count_among(self, index: Ints) -> tuple[int, int]:
        """Of the requests with these indices [n], how many had their prompt cut, and how many their outputs."""
        prompts, outputs = (int(np.isin(index, list(cut)).sum()) for cut in (self.prompts, self.outputs))
        return prompts, outputs
