"""How many executors and sequences does one scheduler plan for?

`core`: the scheduler's core alone, with every sequence of every lane decoding: CPU time of a step of all lanes, its
share of a step of 20 ms, by executors and sequences of each, without changes and with outputs of --output-tokens, where
one in so many sequences ends in each step and another one joins. Conversions to and from bytes are counted, output to
clients is not. `virtual`: the simulator with the same core, executors whose steps take 20 ms and these measured times
for plans, one after the other: output tokens/s of all executors over those of as many that are planned in no time.
With `front`, a plan takes longer by the CPU time of its tokens on their way to clients (rows of service_plane).
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, percentile, wait_quiet
from benchmarks.common.scheduler_load import BLOCK_SIZE, EOS, TOKEN, leavers
from benchmarks.fleet.engine import FRONT_US
from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.results import result_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from cadenza_loadtest.settings import make_settings
from cadenza_simulator.campaign import simulate
from cadenza_simulator.executor_profiles import ExecutorProfile, Overheads, ProfileLimits
from cadenza_simulator.options import scheduler_config
from executor_svc.simulated.costs import StepCosts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from scheduler_svc.engine.freed_memory import release_finished
from scheduler_svc.front.process_memory import collect_rarely

NAME = "lane_scaling"
_TRANSIT_US = 150.0
_VIRTUAL_OUTPUT = 400
"""Tokens of each output: enough that all executors are full before the first request ends."""


def cases_of(options: argparse.Namespace) -> list[LaneCase]:
    """The cases that the options select."""
    outputs = [0, options.output_tokens] if options.output_tokens else [0]
    return [
        LaneCase(lanes, running, output) for lanes in options.lanes for running in options.running for output in outputs
    ]


def measure_core(case: LaneCase, rounds: int, seed: int) -> dict[str, float]:
    """CPU times of a filled core."""
    load = LaneLoad(case, seed)
    load.fill()
    return load.measure(rounds).metrics(case)


def virtual_tokens_per_s(lanes: int, running: int, plan_us: float, seed: int) -> float:
    """Output tokens a second of virtual time, while every executor is full. Raises BenchmarkError if they never are."""
    profile = ExecutorProfile(
        name="20 ms a step",
        costs=StepCosts(step_us=1e6 * STEP_S),
        overheads=Overheads(plan_us=plan_us, transit_us=_TRANSIT_US if plan_us else 0.0),
        limits=ProfileLimits(max_num_seqs=running, max_num_batched_tokens=max(8192, running), max_model_len=512),
    )
    settings = make_settings(
        {
            "num_requests": lanes * running,
            "input_len": "16",
            "output_len": str(_VIRTUAL_OUTPUT),
            "request_rate": float("inf"),
        }
    )
    config = scheduler_config({"max_queued_requests": 1_000_000})
    outcome = simulate(settings, [profile] * lanes, config, seed)
    if not outcome.requests.ok.all():
        raise BenchmarkError(f"{(~outcome.requests.ok).sum()} requests failed")
    begin_s, end_s = float(outcome.requests.first_s.max()), float(outcome.requests.last_s.min())
    if begin_s >= end_s or outcome.steps is None or outcome.step_stride != 1:
        raise BenchmarkError(f"the last request begins after {begin_s:.1f} s, the first one ends after {end_s:.1f} s")
    within = (outcome.steps.applied_s > begin_s) & (outcome.steps.applied_s <= end_s)
    return float(outcome.steps.num_sampled[within].sum()) / (end_s - begin_s)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    collect_rarely()  # As in the service.
    wait_quiet(options.quiet_wait_s)
    lane_us: dict[tuple[int, int], float] = {}
    for case in cases_of(options):
        repeats, other_cores = [], []
        for index in range(options.repeats):
            progress(f"{NAME}: {case}, repeat {index + 1} of {options.repeats}")
            with OtherLoad() as other:
                repeats.append(measure_core(case, options.rounds, options.seed + index))
            other_cores.append(other.cores)
        params = {"what": "core", **asdict(case), "rounds": options.rounds, "step_ms": 1000 * STEP_S}
        row = make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)
        lane_us[case.lanes, case.running] = row.medians["us_per_lane"]
        yield row
    for (lanes, running), plan_us in lane_us.items() if options.virtual else ():
        yield from _virtual_rows(options.seed, lanes, running, plan_us)


def _virtual_rows(seed: int, lanes: int, running: int, plan_us: float) -> Iterator[Row]:
    ideal = virtual_tokens_per_s(lanes, running, 0.0, seed)
    for front in (False, True):
        progress(f"{NAME}: {lanes} executors of {running} sequences in virtual time")
        took_us = plan_us + FRONT_US * running * front
        found = virtual_tokens_per_s(lanes, running, took_us, seed)
        params = {"what": "virtual", "lanes": lanes, "running": running, "front": front, "step_ms": 1000 * STEP_S}
        metrics = {"plan_us": took_us, "output_tokens_per_s": found, "of_ideal_percent": 100 * found / ideal}
        yield make_row(NAME, seed=seed, params=params, repeats=[metrics], other_cores=[])


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    where = f"{params['lanes']} executors of {params['running']} sequences"
    if params["what"] == "virtual":
        front = ", output to clients included" if params["front"] else ""
        return (
            f"{where} in virtual time, {found['plan_us']:.0f} us a plan{front}: "
            f"{found['output_tokens_per_s']:,.0f} output tokens/s, {found['of_ideal_percent']:.1f}% of the ideal"
        )
    change = f"outputs of {params['output_tokens']}" if params["output_tokens"] else "no changes"
    return (
        f"{where}, {change}: plans {found['plan_ms']:.2f} ms ({found['plan_percent']:.1f}% of a step of 20 ms), "
        f"results {found['apply_ms']:.2f}, conversions {found['convert_ms']:.2f}, new requests {found['add_ms']:.2f}; "
        f"whole {found['whole_ms']:.2f} ms ({found['whole_percent']:.1f}%), p99 {found['whole_p99_ms']:.2f}"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lanes", type=positive, nargs="+", default=[1, 4, 16, 64], help="executors")
    parser.add_argument("--running", type=positive, nargs="+", default=[64, 256, 1024], help="sequences of each")
    parser.add_argument("--output-tokens", type=int, default=256, help="of each request; 0: nothing changes")
    parser.add_argument("--rounds", type=positive, default=100, help="timed steps of all lanes (default 100)")
    parser.add_argument("--virtual", action="store_true", help="also in virtual time, with the measured times")


BENCHMARK = Benchmark(
    NAME, "how many executors and sequences does one scheduler plan for?", _add_options, _run, _describe
)


PROMPT_TOKENS = 256
STEP_S = 0.02
"""The step whose share is reported."""
_EPOCH = 1
_MAX_TOKENS = 1_000_000
_IDS = range(300, 8000)


@dataclass(frozen=True, slots=True)
class LaneCase:
    """Decoding sequences of each lane, and how long their outputs are on average."""

    lanes: int
    running: int
    output_tokens: int = 0
    """After a step one in so many sequences ends, and another one joins; 0: nothing changes."""

    @property
    def most_leaving(self) -> int:
        """The largest `num_leaving`."""
        return -(-self.running // self.output_tokens) if self.output_tokens else 0

    def num_leaving(self, step: int) -> int:
        """How many sequences of a lane end with this step."""
        if not self.output_tokens:
            return 0
        return (step + 1) * self.running // self.output_tokens - step * self.running // self.output_tokens


@dataclass(slots=True)
class LaneTimes:
    """CPU time of the parts, over all lanes, in nanoseconds; an entry for each round of steps."""

    plan: list[int] = field(default_factory=list)
    apply: list[int] = field(default_factory=list)
    convert: list[int] = field(default_factory=list)
    """From plans to bytes, and from bytes to results."""
    add: list[int] = field(default_factory=list)
    """New requests."""

    def metrics(self, case: LaneCase) -> dict[str, float]:
        """Means over the rounds, as steps differ in how many requests join; shares are of a step of STEP_S."""
        rounds = [sum(each) for each in zip(self.plan, self.apply, self.convert, self.add, strict=True)]
        means = {name: sum(getattr(self, name)) / len(self.plan) / 1e6 for name in ("plan", "apply", "convert", "add")}
        whole_ms = sum(rounds) / len(rounds) / 1e6
        return {
            **{f"{name}_ms": value for name, value in means.items()},
            "whole_ms": whole_ms,
            "whole_p99_ms": percentile(rounds, 99) / 1e6,
            "plan_percent": means["plan"] / (10 * STEP_S),
            "whole_percent": whole_ms / (10 * STEP_S),
            "us_per_lane": 1000 * whole_ms / case.lanes,
        }


class LaneLoad:
    """A core with so many lanes, in which every sequence decodes."""

    def __init__(self, case: LaneCase, seed: int) -> None:
        self._case, self._rng = case, random.Random(seed)
        self._num_added = self._step = 0
        self._changes = False
        """Whether sequences end: not before all lanes are full."""
        self._stopped: list[set[int]] = [set() for _ in range(case.lanes)]
        self.core = Scheduler()
        longest = PROMPT_TOKENS + 4096
        blocks = (case.running + case.num_leaving(0) + 2) * (math.ceil((PROMPT_TOKENS + 1024) / BLOCK_SIZE) + 1)
        spec = ExecutorSpec(
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
            num_slots=2 * case.running,
            max_num_seqs=case.running,
            max_num_batched_tokens=max(8192, case.running),
            max_model_len=longest,
        )
        for lane in range(case.lanes):
            self.core.add_executor(lane, spec)

    def fill(self) -> None:
        """Add requests until all lanes are full, a hundred at a time, and run them until all decode."""
        want = self._case.lanes * self._case.running
        for _ in range(20 * want):
            if self._num_added < want:
                self._add(min(100, want - self._num_added))
            for lane in range(self._case.lanes):
                self._plan_and_apply(lane)
            decoding = sum(len(lane.decode_batch) for lane in self.core.lanes.values())
            if self._num_added == want and decoding == want:
                return
        raise BenchmarkError(f"of {want} sequences {decoding} decode")

    def measure(self, rounds: int) -> LaneTimes:
        """Time rounds, each a step of every lane with two plans in flight; raises BenchmarkError if lanes run empty."""
        lanes, times, clock = range(self._case.lanes), LaneTimes(), time.process_time_ns
        for lane in lanes:
            self._plan(lane)
        self._changes = True
        gc.collect()
        for _ in range(rounds):
            begin = clock()
            self._add(self._case.lanes * self._case.num_leaving(self._step))
            plan_ns, apply_ns, convert_ns, add_ns = 0, 0, 0, clock() - begin
            for lane in lanes:
                begin = clock()
                plan = self._plan(lane)
                planned = clock()
                plan_to_wire(plan, _EPOCH).SerializeToString()
                converted = clock()
                received = self._received(lane)
                begin_parse = clock()
                result = result_from_wire(pb.StepResult.FromString(received))
                begin_apply = clock()
                self.core.apply_result(lane, result, 0.0)
                release_finished(self.core.take_finished())
                applied = clock()
                plan_ns += planned - begin
                convert_ns += converted - planned + begin_apply - begin_parse
                apply_ns += applied - begin_apply
            self._step += 1
            for name, value in zip(
                ("plan", "apply", "convert", "add"), (plan_ns, apply_ns, convert_ns, add_ns), strict=True
            ):
                getattr(times, name).append(value)
        self._check()
        return times

    def _check(self) -> None:
        running = sum(len(lane.running) for lane in self.core.lanes.values())
        want = self._case.lanes * self._case.running
        # Those that ended are not replaced before the next plans.
        missing = 4 * self._case.lanes * self._case.most_leaving
        if running < want - missing or self.core.num_preemptions:
            raise BenchmarkError(
                f"{running} of {want} sequences run, {len(self.core.waiting)} requests wait, "
                f"{self.core.num_preemptions} were preempted"
            )
        self.core.check_integrity()

    def _add(self, count: int) -> None:
        for prompt in self._prompts(count):
            self._num_added += 1
            sampling = SequenceSampling(stop_token_ids=(EOS,))
            key = f"request {self._num_added}"
            self.core.add_request(RequestSpec(key, prompt, sampling, _MAX_TOKENS, eos_token_ids=frozenset({EOS})), 0.0)

    def _prompts(self, count: int) -> Iterator[tuple[int, ...]]:
        """Random prompts with lengths spread over a block, so that 1 in 16 sequences needs one each step."""
        for index in range(count):
            yield tuple(self._rng.choices(_IDS, k=PROMPT_TOKENS - (self._num_added + index) % BLOCK_SIZE))

    def _plan(self, lane: int) -> StepPlan:
        plan = self.core.plan_step(lane, 0.0)
        if plan is None:
            raise BenchmarkError(f"lane {lane}: nothing to plan")
        return plan

    def _plan_and_apply(self, lane: int) -> None:
        if self.core.plan_step(lane, 0.0) is not None:
            self.core.apply_result(lane, self._result(lane), 0.0)

    def _result(self, lane: int) -> StepResult:
        """The result of a lane's oldest plan in flight, in which all go on or, of those that decode, some end."""
        step, stopped = self.core.lanes[lane].inflight[0], self._stopped[lane]
        stopped.difference_update(step.plan.released_slots)
        slots = [slot for slot in step.sampling_slots if slot not in stopped]
        tokens = [TOKEN] * len(slots)
        count = self._case.num_leaving(self._step) if self._changes else 0
        for index in leavers(step.plan.step_id, len(slots), count):
            tokens[index] = EOS
            stopped.add(slots[index])
        return StepResult(step.plan.step_id, slots=slots, token_ids=tokens, timings=StepTimings(total_ns=1000))

    def _received(self, lane: int) -> bytes:
        result = self._result(lane)
        return pb.StepResult(
            step_id=result.step_id,
            status=pb.STEP_STATUS_OK,
            slots=result.slots,
            token_ids=result.token_ids,
            timings=pb.StepTimings(total_ns=result.timings.total_ns),
        ).SerializeToString()
