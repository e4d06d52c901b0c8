"""Experiment 8: plans in flight against the duration of a step: the executor's idle time, and the wait of new requests.

Two loads: sequences that decode together, and new requests while others decode.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.checkpoints import DEMO_MODEL
from benchmarks.experiments.experiment import Experiment, ExperimentResult, Figure, Finding, RunSettings, Series, Table
from benchmarks.experiments.served import Server
from benchmarks.experiments.simulated import Case, fixed, h200_8b, poisson, run
from cadenza_loadtest.measures.columns import RequestColumns
from cadenza_loadtest.measures.latencies import per_request
from cadenza_loadtest.requests import Floats, RequestShape
from cadenza_simulator.executor_profiles import ExecutorProfile, ProfileLimits
from executor_svc.simulated.costs import StepCosts

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


_SGLANG = "[SGLang](https://lmsys.org/blog/2024-12-04-sglang-v0-4/)"
_TRTLLM = "[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/latest/features/overlap-scheduler.html)"
_STEPS_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


def _run(settings: RunSettings) -> ExperimentResult:
    return _on_cpu(settings) if settings.place == "cpu" else _simulated(settings)


def _simulated(settings: RunSettings) -> ExperimentResult:
    overheads = h200_8b().overheads
    scale = Scale(8, 1000, 20 if settings.quick else 600, settings.seed)

    @contextmanager
    def serving(step_ms: float, depth: int) -> Iterator[Load]:
        profile = ExecutorProfile(costs=StepCosts(step_us=1e3 * step_ms), overheads=overheads, limits=ProfileLimits())
        yield lambda shapes, times: run(Case(profile, shapes, times, {"max_inflight_plans": depth})).requests

    found = measured(scale, (0.5, 10.0) if settings.quick else _STEPS_MS, serving)
    overheads_text = ", ".join(f"{name.removesuffix('_us')} {value:g} µs" for name, value in overheads)
    return _result(settings, scale, found, {"overheads": overheads_text})


def _on_cpu(settings: RunSettings) -> ExperimentResult:
    scale = Scale(8, 400, 5 if settings.quick else 30, settings.seed)

    @contextmanager
    def serving(step_ms: float, depth: int) -> Iterator[Load]:
        with tempfile.TemporaryDirectory() as folder:
            costs = Path(folder) / "costs.json"
            costs.write_text(json.dumps({"step_us": 1e3 * step_ms}), encoding="utf-8")
            with Server(DEMO_MODEL, {"simulate": str(costs), "max_inflight_plans": depth}) as server:
                server.load(fixed([PROMPT_LEN] * 4, [20] * 4))
                yield server.load

    found = measured(scale, (1.0, 5.0) if settings.quick else _STEPS_MS, serving)
    return _result(settings, scale, found, {"executor": "simulated: the services are real, a step only takes its time"})


def _result(settings: RunSettings, scale: Scale, found: Found, setup: dict[str, str]) -> ExperimentResult:
    load = (
        f"{scale.num_sequences} sequences decode; then {scale.num_sequences // 2} do, and {scale.num_newcomers} others "
    )
    return ExperimentResult(
        experiment=EXPERIMENT.name,
        place=settings.place,
        seed=settings.seed,
        setup=setup | {"load": load + f"come for one token each, one in {STEPS_BETWEEN} steps on average"},
        findings=[_hidden(found), _deeper(found), _newcomers(found)],
        figures=[_speed_figure(found), _wait_figure(found)],
        tables=[
            _table("Tokens per second over the ideal, one step after the other:", found, _speed_text),
            _table("Median time to a newcomer's first token, in steps:", found, _wait_text),
        ],
    )


def _speed_figure(found: Found) -> Figure:
    return Figure(
        name="speed",
        title="Plans in flight keep the executor busy",
        x_label="duration of a step (ms)",
        y_label="tokens/s over the ideal (%)",
        series=[
            _series(depth, {step_ms: 100 * float(np.median(point.speed)) for step_ms, point in points.items()})
            for depth, points in found.items()
        ],
        log_x=True,
        caption="The ideal is one step after the other.",
    )


def _wait_figure(found: Found) -> Figure:
    return Figure(
        name="newcomers",
        title="What newcomers wait",
        x_label="duration of a step (ms)",
        y_label="median time to the first token (steps)",
        series=[
            _series(depth, {step_ms: float(np.median(point.wait)) for step_ms, point in points.items()})
            for depth, points in found.items()
        ],
        log_x=True,
        caption="One that comes to an idle executor takes one step; if one runs, half of it besides, on average.",
    )


def _series(depth: int, values: dict[float, float]) -> Series:
    label = "1 plan in flight" if depth == 1 else f"{depth} plans"
    return Series(label=label, x=list(values), y=list(values.values()))


def _table(title: str, found: Found, text: Callable[[Point], str]) -> Table:
    steps_ms = list(found[1])
    rows = [[str(depth), *(text(points[step_ms]) for step_ms in steps_ms)] for depth, points in found.items()]
    return Table(title=title, columns=["plans in flight", *(f"{step_ms:g} ms" for step_ms in steps_ms)], rows=rows)


def _speed_text(point: Point) -> str:
    return f"{np.median(point.speed):.1%}"


def _wait_text(point: Point) -> str:
    return f"{np.median(point.wait):.2f}"


def _medians(points: dict[float, Point]) -> dict[float, float]:
    return {step_ms: float(np.median(point.speed)) for step_ms, point in points.items()}


def _hidden(found: Found) -> Finding:
    one, two = _medians(found[1]), _medians(found[2])
    gains = {step_ms: two[step_ms] / one[step_ms] for step_ms in one}
    evidence = ", ".join(f"{gain:.2f}x at {step_ms:g} ms" for step_ms, gain in gains.items())
    return Finding(
        claim=f"One plan ahead hides the work between steps ({_SGLANG}: 1.1 times the throughput). Holds if each step "
        "time gains, the shorter the more",
        held=min(gains.values()) > 1 and list(gains.values()) == sorted(gains.values(), reverse=True),
        evidence=f"two plans in flight against one: {evidence}",
    )


def _deeper(found: Found) -> Finding:
    two, four = _medians(found[2]), _medians(found[4])
    steps = [step_ms for step_ms in two if step_ms >= 1]
    most = max(four[step_ms] / two[step_ms] for step_ms in steps)
    shortest = min(two)
    return Finding(
        claim="Two are enough for steps of 1 ms and more (expected here). Holds if four add no 2%",
        held=most < 1.02,
        evidence=f"four against two: at most {most:.3f}x from {steps[0]:g} ms on; "
        f"at {shortest:g} ms {two[shortest]:.0%} of the ideal with two, {four[shortest]:.0%} with four",
    )


def _newcomers(found: Found) -> Finding:
    longest = max(found[1])
    waits = {depth: float(np.median(points[longest].wait)) for depth, points in found.items()}
    evidence = ", ".join(f"{depth}: {wait:.2f} steps" for depth, wait in waits.items())
    return Finding(
        claim=f"Working ahead costs a step ({_TRTLLM}), and less where plans are sent late in the step before "
        "(expected here). Holds if two in flight cost newcomers less than half a step",
        held=waits[2] - waits[1] < 0.5,
        evidence=f"median TTFT with steps of {longest:g} ms, by plans in flight: {evidence}",
    )


EXPERIMENT = Experiment(
    name="8-pipelining",
    title="Plans in flight against the duration of a step",
    hypothesis=f"""
Between two steps a scheduler applies the result of one and makes the plan of the next, and with the scheduler in its
own process both are also transmitted. If the executor waits for that, it idles: {_SGLANG} says that an engine may spend
as much as half of its time so, and that its scheduler, which runs one batch ahead, brought 1.1 times the throughput.
The price is a step that was planned before the last result was known ({_TRTLLM} counts one extra decoding step), and a
newcomer that finds the next step planned already. Here plans in flight are limited by `--max-inflight-plans`, and a
plan is sent as late in the running step as keeps the executor busy: so two in flight should bring nearly all of the
throughput and cost newcomers little.
""",
    run=_run,
    places=("simulate", "cpu"),
    notes="""
In virtual time, two plans in flight are just enough for steps of 0.5 ms, as the plan and its way there and back take
that long. The next plan goes out at 0.7 times the step's predicted duration less 4 ms; the prediction is the least of
the last four durations of steps of its size. It once was the least of the last eight of all sizes, each scaled by its
tokens, as if a step of half the tokens took half the time. Here it takes the same time, so that whenever a prompt was
among the last eight steps, the plan went out far too early, and a newcomer waited 0.8 steps more than with one plan in
flight; this experiment found that.

On this machine's two cores, which both services and the client share, what lies between two steps takes 2.5 to 3 ms.
Two plans in flight hide it from steps of 5 ms on. Below that the services are what is waited for, whatever the depth:
of 2 ms two reach three quarters of the ideal and four a little more, and at 1 ms and less newcomers wait for the client
and the scheduler rather than for steps.
""",
)
