"""What does placing a request cost, by the number of executors and the length of its prompt?

All executors have the whole prompt in their prefix caches, which makes the lookups as long as they can be; each of
them runs as many other requests. CPU time of one placement on arrival, over as many plans as it takes, of its part in
one plan, and of the lookups that it contains. `again`: the same for a lane that looks for a request to take over, which
looks nothing up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.common.benchmark import Benchmark, positive
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import Row, make_row
from cadenza_common.plan.result import StepResult, StepTimings
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.queues.passed import NOTHING_PASSED
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec

NAME = "placement_cost"
_RUNNING = 64
_ROUNDS = 101
_VOCABULARY = 32_000
_UNKNOWN_ID = 1_000_000_000
"""From here on no sequence has been looked up: lookups of a known one begin where the last one ended."""


class _Core(Scheduler):
    """The core, whose placements can be made one by one."""

    def place(self, now: float) -> list[int]:
        """Place the requests that arrived; returns the nanoseconds of each plan's part."""
        parts = []
        while self._requests.placer.num_unplaced:
            began = time.thread_time_ns()
            self._requests.placer.place(now)
            parts.append(time.thread_time_ns() - began)
        return parts

    def look_elsewhere(self, executor_id: int, now: float) -> None:
        """What a lane without a request of its own does in a plan."""
        next(self._requests.placer.heads(self.lanes[executor_id], now, NOTHING_PASSED), None)

    def group(self, request_id: str) -> SequenceGroup:
        """An unfinished request."""
        return next(group for group in self.groups.values() if group.spec.request_id == request_id)


def warm_core(num_lanes: int, prompt: tuple[int, ...]) -> _Core:
    """A core whose lanes have all computed the prompt and run other requests."""
    spec = ExecutorSpec(
        block_size=16, num_blocks=8192, num_slots=512, max_num_seqs=256, max_num_batched_tokens=4096,
        max_model_len=65_536, watermark=0.0,
    )  # fmt: skip
    core = _Core(Policies(prefix_caching=True))
    for executor_id in range(num_lanes):
        core.add_executor(executor_id, spec)
    for executor_id in range(num_lanes):
        for other in range(num_lanes):
            core.drain_executor(other, other != executor_id, 0.0)
        core.add_request(RequestSpec(f"first {executor_id}", prompt, SequenceSampling(), 1), 0.0)
        _run(core, executor_id, f"first {executor_id}")
    for executor_id in range(num_lanes):
        core.drain_executor(executor_id, False, 0.0)
    for index in range(_RUNNING * num_lanes):
        core.add_request(RequestSpec(f"other {index}", (index + 1, 2, 3), SequenceSampling(), 10_000), 0.0)
    for _ in range(4):
        for executor_id in range(num_lanes):
            _step(core, executor_id)
    return core


def _run(core: _Core, executor_id: int, request_id: str) -> None:
    while any(group.spec.request_id == request_id for group in core.groups.values()):
        _step(core, executor_id)


def _step(core: _Core, executor_id: int) -> None:
    plan = core.plan_step(executor_id, 0.0)
    if plan is None:
        return
    step = core.lanes[executor_id].inflight[-1]
    slots = [*step.decode_slots, *(chunk.slot for chunk in step.chunks if chunk.samples)]
    ns = 10_000_000 + 60_000 * step.total_tokens
    result = StepResult(plan.step_id, slots=slots, token_ids=[1] * len(slots), timings=StepTimings(device_ns=ns))
    core.apply_result(executor_id, result, 0.0)


def measure(num_lanes: int, num_tokens: int, seed: int) -> dict[str, float]:
    """CPU microseconds of a placement, its part in a plan, its lookups, and a look at other lanes' requests."""
    prompt = tuple(np.random.default_rng(seed).integers(1, _VOCABULARY, num_tokens).tolist())
    core = warm_core(num_lanes, prompt)
    placing, longest, looking, again = [], [], [], []
    for index in range(_ROUNDS):
        name = f"measured {index}"
        core.add_request(RequestSpec(name, prompt, SequenceSampling(), 16), 1.0)
        parts = core.place(1.0)
        placing.append(sum(parts))
        longest.append(max(parts))
        group = core.group(name)
        other = next(executor_id for executor_id in core.lanes if executor_id != group.placed_on)
        began = time.thread_time_ns()
        core.look_elsewhere(other, 1.0)
        again.append(time.thread_time_ns() - began)
        sequence = Sequence(_UNKNOWN_ID + index, group, 0)
        began = time.thread_time_ns()
        for lane in core.lanes.values():
            lane.blocks.find_cached_prefix(sequence)
        looking.append(time.thread_time_ns() - began)
        core.abort(group.key, FinishDetail.ABORTED)
    return {
        "placement_us": statistics.median(placing) / 1e3,
        "longest_us": statistics.median(longest) / 1e3,
        "lookups_us": statistics.median(looking) / 1e3,
        "again_us": statistics.median(again) / 1e3,
    }


def _run_all(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    for num_tokens in options.tokens:
        for num_lanes in options.executors:
            repeats, other_cores = [], []
            for index in range(options.repeats):
                with OtherLoad() as other:
                    repeats.append(measure(num_lanes, num_tokens, options.seed + index))
                other_cores.append(other.cores)
            params = {"executors": num_lanes, "prompt_tokens": num_tokens, "running": _RUNNING}
            yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    return (
        f"{params['executors']} executors, {params['prompt_tokens']} tokens: {found['placement_us']:.0f} us a "
        f"placement, {found['longest_us']:.0f} us at most in one plan, {found['lookups_us']:.0f} us prefix lookups; "
        f"{found['again_us']:.0f} us to look again"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executors", type=positive, nargs="+", default=[2, 4, 8, 16], help="(default 2 4 8 16)")
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1024, 32768], help="(default 1024 32768)")


BENCHMARK = Benchmark(NAME, "what does placing a request on an executor cost?", _add_options, _run_all, _describe)
