"""Runs of the experiments in virtual time: from a case to columns and metrics.

    profile = a100_13b() shapes = fixed(prompts, outputs)  # or drawn({"workload": "sharegpt"}, 500, seed) case =
    Case(profile, shapes, poisson(4.0, len(shapes), seed), scheduler={"batching": "dynamic", "batch_size": 8})
    run(case).measure().e2e_s.p99

The environment has no effect: an option that a case does not give has its default.

Runs the scheduler's core step by step and observes its state after each plan, beyond what StepColumns record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.common.rows import BenchmarkError
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_loadtest.arrivals import make_arrivals
from cadenza_loadtest.measures.columns import RequestColumns, StepColumns
from cadenza_loadtest.measures.latencies import Window
from cadenza_loadtest.measures.metrics import Metrics, measure
from cadenza_loadtest.measures.slo import Slo
from cadenza_loadtest.requests import RequestShape
from cadenza_loadtest.workloads.prompts import Prompts
from cadenza_loadtest.workloads.workloads import WorkloadSpec, make_workload
from cadenza_simulator.executor_profiles import ExecutorProfile
from cadenza_simulator.lanes import TOKEN, SimulatedLane
from cadenza_simulator.published import PUBLISHED
from cadenza_simulator.run import RunOutcome, Simulation
from cadenza_simulator.traffic import Traffic
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BeamSpec, RequestSpec


@dataclass(frozen=True, slots=True)
class Case:
    """A simulation. Options have the services' names."""

    profile: ExecutorProfile
    shapes: Sequence[RequestShape]
    times: Sequence[float] | None = None
    """[n] due times in seconds; None: all at once."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Options of SchedulerConfig: batching, max_num_seqs, preemption, …"""
    executor: Mapping[str, Any] = field(default_factory=dict)
    """Options that replace the profile's limits: block_size, num_gpu_blocks, num_cpu_blocks, max_num_seqs, …"""
    prompt_seed: int | None = None
    """Seed of prompts as token ids, in which the prefix cache finds shared prefixes; None: no shared prefixes."""
    keep_gaps: bool = False
    """Keep inter-token latencies."""
    num_executors: int = 1


@dataclass(frozen=True, slots=True)
class Ran:
    """The results of a case."""

    case: Case
    outcome: RunOutcome

    @property
    def requests(self) -> RequestColumns:
        """A row for each request."""
        return self.outcome.requests

    @property
    def steps(self) -> StepColumns:
        """A row for each step, or for every `outcome.step_stride` of them."""
        assert self.outcome.steps is not None
        return self.outcome.steps

    @property
    def duration_s(self) -> float:
        """From the start to the last token."""
        return float(self.requests.last_s.max())

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run."""
        return float(self.requests.num_output_tokens.sum()) / self.duration_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens per second over the whole run: the throughput of the Anyscale post."""
        return float((self.requests.num_prompt_tokens + self.requests.num_output_tokens).sum()) / self.duration_s

    def measure(self, window: Window | None = None, slo: Slo | None = None) -> Metrics:
        """The harness's metrics; `window` is in seconds of the run, None: the whole run."""
        return measure(self.requests, window=window, slo=slo, steps=self.outcome.steps)


def run(case: Case) -> Ran:
    """Run a case; raises BenchmarkError if a request failed, because the numbers would not be comparable."""
    profile = case.profile.changed(dict(case.executor))
    times = itertools.repeat(0.0) if case.times is None else case.times
    traffic = Traffic(iter(zip(times, case.shapes, strict=case.times is not None)))
    prompts = None if case.prompt_seed is None else Prompts(case.prompt_seed)
    config = scheduler_config({"max_queued_requests": len(case.shapes) + 1, **case.scheduler})
    fleet = [profile] * case.num_executors
    outcome = Simulation(fleet, config, traffic, prompts=prompts, keep_gaps=case.keep_gaps).run()
    failed = outcome.requests.error[~outcome.requests.ok]
    if len(failed) or len(outcome.requests) != len(case.shapes):
        raise BenchmarkError(f"{len(failed)} of {len(case.shapes)} requests failed: {sorted(set(failed.tolist()))}")
    return Ran(case, outcome)


def scheduler_config(options: Mapping[str, Any]) -> SchedulerConfig:
    """The scheduler's configuration with these options; ignores the environment."""
    defaults = {
        name: each.get_default(call_default_factory=True) for name, each in SchedulerConfig.model_fields.items()
    }
    return SchedulerConfig(**{**defaults, **options})


def fixed(prompts: Sequence[int], outputs: Sequence[int], kinds: Sequence[str] | None = None) -> list[RequestShape]:
    """[n] requests of these lengths, in tokens; `kinds`: labels for which metrics are reported separately."""
    labels = [""] * len(prompts) if kinds is None else kinds
    lengths = zip(prompts, outputs, labels, strict=True)
    return [RequestShape(index, int(i), int(o), kind) for index, (i, o, kind) in enumerate(lengths)]


def drawn(options: Mapping[str, Any], count: int, seed: int) -> list[RequestShape]:
    """`count` requests of a workload; options as for `cadenza loadtest`: workload, input_len, output_len, …"""
    return list(make_workload(WorkloadSpec(**options)).shapes(count, seed))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """[count] arrival times of a Poisson process in seconds; `rate` per second, inf: all at once."""
    return list(itertools.islice(make_arrivals("poisson", rate).times(seed), count))


def about(profile: ExecutorProfile) -> dict[str, str]:
    """Facts about a profile for an experiment's `setup`."""
    limits, costs = profile.limits, profile.costs.model_dump(exclude_defaults=True)
    costs_text = ", ".join(f"{name} {value:g}" for name, value in costs.items())
    pool = f"{limits.pool_size:,} blocks of {limits.block_size} tokens"
    return {"executor": f"{profile.name} ({costs_text})", "KV pool": pool}


def a100_13b() -> ExecutorProfile:
    """OPT-13B on an A100 of 40 GB, as in the vLLM paper and the Anyscale post."""
    return PUBLISHED["a100-40gb-opt-13b"]


def h200_8b() -> ExecutorProfile:
    """Llama-3.1-8B on an H200."""
    return PUBLISHED["h200-llama-3.1-8b"]


Look = Callable[[Scheduler, float], None]
"""Called with the core after each plan, and the seconds until the step's result is applied."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a run."""

    duration_s: float
    """From the start to the last token, in virtual time."""
    num_steps: int
    num_preemptions: int


def step_through(
    profile: ExecutorProfile,
    shapes: Sequence[RequestShape],
    look: Look,
    *,
    policies: Policies | None = None,
    watermark: float = 0.01,
) -> Stepped:
    """Serve requests that all arrive at once, with one plan in flight, so that the state does not change while a plan
    runs.

    Raises BenchmarkError if the core finds nothing to plan while requests wait.
    """
    core = Scheduler(policies or Policies())
    core.add_executor(0, profile.spec(scheduler_config({"watermark": watermark})))
    lane, now = SimulatedLane(0, profile, core.lanes[0], 1), 0.0
    for shape in shapes:
        core.add_request(_spec(shape), now)
    has_beams = any(shape.beam_width for shape in shapes)
    while core.groups:
        if core.plan_step(0, now) is None:
            raise BenchmarkError(f"{len(core.groups)} requests wait forever: the policy admits none of them")
        inflight_step = lane.launch(lane.core.inflight[-1], now, beams=has_beams)
        look(core, inflight_step.result_at - now)
        now = inflight_step.result_at
        lane.take_result(now)
        core.apply_result(0, inflight_step.result, now)
        core.take_finished()
    return Stepped(now, core.num_steps, core.num_preemptions)


def apart(shapes: Sequence[RequestShape]) -> list[RequestShape]:
    """The same without sharing: each sample or beam as a separate request."""
    counts = [shape.beam_width or shape.n for shape in shapes]
    alone = [
        replace(shape, n=1, beam_width=0) for shape, count in zip(shapes, counts, strict=True) for _ in range(count)
    ]
    return [replace(shape, index=index) for index, shape in enumerate(alone)]


def _spec(shape: RequestShape) -> RequestSpec:
    return RequestSpec(
        str(shape.index),
        (TOKEN,) * shape.num_prompt_tokens,
        SequenceSampling(),
        shape.num_output_tokens,
        num_samples=1 if shape.beam_width else shape.n,
        beams=BeamSpec(shape.beam_width) if shape.beam_width else None,
    )
