"""What does the scheduler cost a step? plan_step + apply_result while every running sequence decodes.

The core alone, two plans in flight as in the service: no executor, no gRPC. Results are made up in columns outside of
the timed part. Contexts are spread over one KV block, so that in each step 1 sequence in 16 needs a block. With churn,
in each step a share of the sequences ends with EOS and as many newcomers, with prompts of 64 tokens, are there to join.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.stats import percentile
from scheduler_svc.convert import execution
from scheduler_svc.core.news import News
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, RequestSpec, Sampling, StepPlan, StepResult

NAME = "scheduler_cost"
SIZES = (16, 64, 256, 1024, 4096)
BLOCK_SIZE = 16  # tokens
_EXECUTOR = 0
_EPOCH = 1
_TOKEN = 7
_EOS = 2
_PREFILL_BUDGET = 65_536  # tokens a step: setting up is quick
_WARM_UP_STEPS = 8  # until as many leave as join
_JOINER = tuple(range(300, 364))


@dataclass(slots=True)
class Samples:
    """One entry per timed step."""

    plan_us: list[float] = field(default_factory=list)
    apply_us: list[float] = field(default_factory=list)
    convert_us: list[float] = field(default_factory=list)  # to the wire
    plan_bytes: list[int] = field(default_factory=list)  # on the wire

    def metrics(self) -> dict[str, float]:
        """Medians over the steps unless the name says otherwise. step = plan + apply, without convert."""
        step_us = [plan + apply for plan, apply in zip(self.plan_us, self.apply_us, strict=True)]
        return {
            "step_us": statistics.median(step_us),
            "step_mean_us": statistics.fmean(step_us),
            "step_p99_us": percentile(step_us, 99),
            "plan_us": statistics.median(self.plan_us),
            "apply_us": statistics.median(self.apply_us),
            "convert_us": statistics.median(self.convert_us),
            "plan_bytes": statistics.median(self.plan_bytes),
            "plan_mean_bytes": statistics.fmean(self.plan_bytes),
        }


def steady_core(num_running: int, context_len: int, num_steps: int, seed: int) -> Scheduler:
    """A core in which `num_running` sequences of about `context_len` tokens decode, with room for `num_steps` more."""
    rng = random.Random(seed)
    longest = context_len + BLOCK_SIZE + num_steps + 16
    core = Scheduler()
    spec = ExecutorSpec(
        block_size=BLOCK_SIZE,
        num_blocks=(num_running + 1) * (longest // BLOCK_SIZE + 2),
        num_slots=2 * num_running,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(_PREFILL_BUDGET, num_running),
        max_model_len=2 * longest,
    )
    core.add_executor(_EXECUTOR, spec)
    for index in range(num_running):
        # The mean of the contexts is context_len, up to half a token.
        num_prompt = max(1, context_len - BLOCK_SIZE // 2 + index % BLOCK_SIZE)
        prompt = tuple(rng.randrange(300, 8000) for _ in range(num_prompt))
        core.add_request(
            RequestSpec(
                str(index), prompt, Sampling(temperature=0.0, stop_token_ids=(_EOS,)), eos_token_ids=frozenset({_EOS})
            ),
            0.0,
        )
    while core.num_output_tokens < num_running or any(seq.num_output_tokens < 1 for seq in core.lanes[0].running):
        plan = _plan(core)
        _apply(core, made_up_result(core, plan))
    core.check_integrity()
    return core


def measure(core: Scheduler, num_running: int, num_steps: int, churn: float = 0.0) -> Samples:
    """Time steps, two plans in flight; without churn raises BenchmarkError for one that does not decode all of them."""
    samples = Samples()
    changing = Churn(max(1, round(churn * num_running)) if churn else 0)
    _plan(core)
    for _ in range(_WARM_UP_STEPS if churn else 0):
        changing.join(core)
        _plan(core)
        _apply(core, changing.result(core))
    gc.collect()
    for _ in range(num_steps):
        changing.join(core)
        begin = time.perf_counter_ns()
        plan = _plan(core)
        planned = time.perf_counter_ns()
        wire = execution.step_plan(plan, _EPOCH).SerializeToString()
        converted = time.perf_counter_ns()
        result = changing.result(core)
        begin_apply = time.perf_counter_ns()
        news = _apply(core, result)
        applied = time.perf_counter_ns()
        if churn:
            _check_churn(core, plan, num_running)
        else:
            _check_steady(plan, news, num_running)
        samples.plan_us.append((planned - begin) / 1e3)
        samples.convert_us.append((converted - planned) / 1e3)
        samples.apply_us.append((applied - begin_apply) / 1e3)
        samples.plan_bytes.append(len(wire))
    core.check_integrity()
    return samples


class Churn:
    """Results in which `count` sequences end with EOS in each step, and the newcomers that take their places."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._num_joined = 0
        self._stopped: set[int] = set()

    def join(self, core: Scheduler) -> None:
        """Queue this step's newcomers."""
        for _ in range(self._count):
            self._num_joined += 1
            spec = RequestSpec(
                f"joiner {self._num_joined}", _JOINER, Sampling(0.0, stop_token_ids=(_EOS,)), None, frozenset({_EOS})
            )
            core.add_request(spec, 0.0)

    def result(self, core: Scheduler) -> StepResult:
        """Of the oldest plan in flight: slots that have stopped stay silent until they are released."""
        step = core.lanes[_EXECUTOR].inflight[0]
        self._stopped.difference_update(step.plan.released_slots)
        slots = [slot for slot in step.sampling_slots if slot not in self._stopped]
        tokens = [_TOKEN] * len(slots)
        first = step.plan.step_id * self._count % max(1, len(slots) - self._count)
        for index in range(first, min(first + self._count, len(slots))):
            tokens[index] = _EOS
            self._stopped.add(slots[index])
        return StepResult(step.plan.step_id, slots=slots, token_ids=tokens, total_ns=1000)


def made_up_result(core: Scheduler, plan: StepPlan) -> StepResult:
    """The result of the oldest plan in flight: one token for each slot that samples."""
    oldest = core.lanes[plan.executor_id].inflight[0]
    slots = list(oldest.sampling_slots)
    return StepResult(oldest.plan.step_id, slots=slots, token_ids=[_TOKEN] * len(slots), total_ns=1000)


def _plan(core: Scheduler) -> StepPlan:
    plan = core.plan_step(_EXECUTOR, 0.0)
    if plan is None:
        raise BenchmarkError("the core found nothing to plan")
    return plan


def _apply(core: Scheduler, result: StepResult) -> News:
    return core.apply_result(_EXECUTOR, result, 0.0)[1]


def _check_steady(plan: StepPlan, news: News, num_running: int) -> None:
    changed = plan.admitted or plan.released_slots or plan.scheduled_slots
    if changed or not plan.decode_ready:
        raise BenchmarkError(f"step {plan.step_id} is not decode-only")
    if news.token_ids != [_TOKEN] * num_running or len(news.sequences) != num_running or news.finishes:
        raise BenchmarkError(f"step {plan.step_id}: {len(news.token_ids)} tokens instead of {num_running}, or an end")


def _check_churn(core: Scheduler, plan: StepPlan, num_running: int) -> None:
    if not plan.admitted or not plan.decode_ready:
        raise BenchmarkError(f"step {plan.step_id}: nobody joined")
    if not 0.8 * num_running <= len(core.lanes[_EXECUTOR].running) <= num_running:
        raise BenchmarkError(f"step {plan.step_id}: {len(core.lanes[_EXECUTOR].running)} of {num_running} run")


def _run(options: argparse.Namespace) -> Iterator[Row]:
    sizes: list[int] = options.running
    cases = [(num_running, churn) for num_running in sizes for churn in options.churn]
    repeats: dict[tuple[int, float], list[dict[str, float]]] = {case: [] for case in cases}
    other_cores = []
    wait_quiet(options.quiet_wait_s)
    for index in range(options.repeats):
        progress(f"{NAME}: repeat {index + 1} of {options.repeats}")
        # Around all sizes and their set-up: a small size alone takes too few of the kernel's ticks to be judged.
        with OtherLoad() as other:
            for num_running, churn in cases:
                core = steady_core(num_running, options.context_len, options.steps, options.seed)
                found = measure(core, num_running, options.steps, churn)
                repeats[num_running, churn].append(found.metrics())
        other_cores.append(other.cores)
    for (num_running, churn), metrics in repeats.items():
        params = {
            "running": num_running,
            "churn": churn,
            "context_len": options.context_len,
            "steps": options.steps,
            "block_size": BLOCK_SIZE,
            "inflight_plans": 2,
        }
        yield make_row(NAME, seed=options.seed, params=params, repeats=metrics, other_cores=other_cores)


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    return (
        f"{params['running']:5} running, churn {params['churn']:.0%}: {found['step_us']:8.1f} us a step "
        f"(plan {found['plan_us']:.1f}, apply {found['apply_us']:.1f}, p99 {found['step_p99_us']:.1f}); "
        f"to the wire {found['convert_us']:.1f} us, {found['plan_bytes']:.0f} bytes "
        f"(mean {found['plan_mean_bytes']:.0f})"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=positive, nargs="+", default=list(SIZES), help="running sequences")
    parser.add_argument(
        "--churn", type=float, nargs="+", default=[0.0, 0.05], help="shares of the sequences that change each step"
    )
    parser.add_argument("--steps", type=positive, default=200, help="timed steps of each repeat (default 200)")
    parser.add_argument("--context-len", type=positive, default=1000, help="tokens of each sequence (default 1000)")


BENCHMARK = Benchmark(NAME, "what does the scheduler cost a step?", _add_options, _run, _describe)
