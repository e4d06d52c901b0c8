"""Loads of experiment 8: sequences that decode together, and new requests while others decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.experiments.simulated import fixed, poisson
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import per_request
from cadenza_loadtest.requests import Floats, RequestShape

PROMPT_LEN = 8
STEPS_BETWEEN = 5
"""Mean number of steps between two new requests; a Poisson process."""
_DEPTHS = (1, 2, 3, 4)

Load = Callable[[Sequence[RequestShape], Sequence[float] | None], RequestColumns]
Serving = Callable[[float, int], AbstractContextManager[Load]]
"""A server, from the milliseconds of a step and the number of plans in flight."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes for one place."""

    num_sequences: int
    num_tokens: int
    """Output tokens of each sequence, limited to two seconds at the ideal pace."""
    num_newcomers: int
    seed: int


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one step time at one depth."""

    speed: Floats
    """[sequences] the step's duration over the time between two tokens: 1 if the executor is never idle."""
    wait: Floats
    """[new requests] time to the first token, in steps."""


Found = dict[int, dict[float, Point]]
"""By depth, then by step time in ms."""


def measured(scale: Scale, steps_ms: Sequence[float], serving: Serving) -> Found:
    """Measure each step time at each depth, on a separate server."""
    found: Found = {depth: {} for depth in _DEPTHS}
    for depth in _DEPTHS:
        for step_ms in steps_ms:
            with serving(step_ms, depth) as load:
                found[depth][step_ms] = Point(_speed(scale, step_ms, load), _wait(scale, step_ms, load))
    return found


def _speed(scale: Scale, step_ms: float, load: Load) -> Floats:
    """Measure sequences that start together and decode together."""
    num_tokens = min(scale.num_tokens, int(2000 / step_ms))
    columns = load(fixed([PROMPT_LEN] * scale.num_sequences, [num_tokens] * scale.num_sequences), None)
    speed: Floats = step_ms / 1e3 / per_request(columns)["tpot_s"]
    return speed


def _wait(scale: Scale, step_ms: float, load: Load) -> Floats:
    """Measure new requests of one token each, while others decode."""
    step_s = step_ms / 1e3
    times = [10 * step_s + due for due in poisson(1 / (STEPS_BETWEEN * step_s), scale.num_newcomers, scale.seed)]
    others = scale.num_sequences // 2
    num_steps = round(times[-1] / step_s) + 20
    shapes = fixed([PROMPT_LEN] * (others + len(times)), [num_steps] * others + [1] * len(times))
    waits: Floats = per_request(load(shapes, [0.0] * others + times))["ttft_s"][others:] / step_s
    return waits
