"""Measures time and memory of the scheduler core under a synthetic load, without executor or gRPC."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from typing import Any

from benchmarks.common.rows import BenchmarkError
from benchmarks.common.scheduler_load import (
    BLOCK_SIZE,
    EOS,
    PREFILL_BUDGET,
    TOKEN,
    WARM_UP_STEPS,
    Case,
    StepTimes,
    leavers,
)
from cadenza.v1 import execution_pb2 as pb
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from cadenza_common.plan.sampling import SequenceSampling
from cadenza_common.plan_wire.results import result_from_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ExecutorSpec, RequestSpec
from scheduler_svc.engine.freed_memory import release_finished

_EXECUTOR = 0
_EPOCH = 1
_MAX_TOKENS = 1_000_000
"""Requested tokens; sequences end earlier, by EOS."""


def empty_core(case: Case, num_steps: int) -> Scheduler:
    """A core without requests, large enough for this case and this number of timed steps."""
    policies: dict[str, Any] = {"prefix_caching": True} if case.prefix_cache else {}
    core = Scheduler(Policies(**policies))
    spec = ExecutorSpec(
        block_size=BLOCK_SIZE,
        num_blocks=case.num_blocks(num_steps),
        num_slots=2 * case.running,
        max_num_seqs=case.running,
        max_num_batched_tokens=max(PREFILL_BUDGET, case.running),
        max_model_len=2 * case.longest(num_steps),
    )
    core.add_executor(_EXECUTOR, spec)
    return core


def start(core: Scheduler, prompts: list[tuple[int, ...]]) -> None:
    """Add requests and run them until each has a token, so that all of them decode."""
    for index, prompt in enumerate(prompts):
        core.add_request(_request(str(index), prompt), 0.0)
    while any(seq.num_output_tokens < 1 for seq in core.lanes[_EXECUTOR].running) or len(core.waiting):
        _plan(core)
        _apply(core, _all_go_on(core))
    core.check_integrity()


def measure(core: Scheduler, case: Case, num_steps: int, seed: int) -> StepTimes:
    """Time steps of a started core with two plans in flight; raises BenchmarkError for an unexpected step."""
    changing = _Churn(case, seed)
    _plan(core)
    for _ in range(WARM_UP_STEPS if case.churn else 0):
        changing.join(core)
        _plan(core)
        _apply(core, changing.result(core))
    gc.collect()
    times, clock = StepTimes(), time.process_time_ns
    for _ in range(num_steps):
        added = changing.join(core)
        begin = clock()
        plan = _plan(core)
        planned = clock()
        wire = plan_to_wire(plan, _EPOCH).SerializeToString()
        converted = clock()
        result = changing.result(core)
        received = _wire_result(result)
        begin_parse = clock()
        result = result_from_wire(pb.StepResult.FromString(received))
        begin_apply = clock()
        outputs = _apply(core, result)
        release_finished(core.take_finished())
        applied = clock()
        _check(case, plan, outputs, num_running=len(core.lanes[_EXECUTOR].running))
        times.add(
            added,
            planned - begin,
            converted - planned,
            applied - begin_apply,
            len(wire),
            parsed=begin_apply - begin_parse,
        )
    if core.num_preemptions:
        raise BenchmarkError(f"{core.num_preemptions} sequences were preempted: the pool is too small")
    core.check_integrity()
    return times


def memory_per_sequence(case: Case, seed: int) -> dict[str, float]:
    """Memory per running sequence, by tracemalloc: bytes allocated between the empty core and all sequences decoding.

    Without the lists of output tokens, and without the prompts, which belong to the caller. The executor's pool (free
    blocks, slots), which exists before the first request, is given as `pool_bytes_per_block`.
    """
    prompts = case.prompts(seed)
    gc.collect()
    tracemalloc.start()
    try:
        core = empty_core(case, num_steps=0)
        gc.collect()
        empty = tracemalloc.get_traced_memory()[0]
        start(core, prompts)
        gc.collect()
        full = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    tokens = sum(sys.getsizeof(sequence.output_ids) for sequence in core.lanes[_EXECUTOR].running)
    return {
        "memory_bytes_per_seq": (full - empty - tokens) / case.running,
        "pool_bytes_per_block": empty / case.num_blocks(0),
    }


class _Churn:
    """Makes results in which some sequences end with EOS in each step, and the requests that replace them."""

    def __init__(self, case: Case, seed: int) -> None:
        self._count = case.num_changing
        self._prompts = case.joiner_prompts(seed)
        self._num_joined = 0
        self._stopped: set[int] = set()

    def join(self, core: Scheduler) -> int:
        """Queue this step's new requests; returns the nanoseconds that this took."""
        prompts = [next(self._prompts) for _ in range(self._count)]
        begin = time.process_time_ns()
        for prompt in prompts:
            self._num_joined += 1
            core.add_request(_request(f"joiner {self._num_joined}", prompt), 0.0)
        return time.process_time_ns() - begin

    def result(self, core: Scheduler) -> StepResult:
        """The result of the oldest plan in flight; slots that have stopped give no tokens until they are released."""
        if not self._count:
            return _all_go_on(core)
        step = core.lanes[_EXECUTOR].inflight[0]
        self._stopped.difference_update(step.plan.released_slots)
        slots = [slot for slot in step.sampling_slots if slot not in self._stopped]
        tokens = [TOKEN] * len(slots)
        for index in leavers(step.plan.step_id, len(slots), self._count):
            tokens[index] = EOS
            self._stopped.add(slots[index])
        return StepResult(step.plan.step_id, slots=slots, token_ids=tokens, timings=StepTimings(total_ns=1000))


def _request(request_id: str, prompt: tuple[int, ...]) -> RequestSpec:
    sampling = SequenceSampling(stop_token_ids=(EOS,))
    return RequestSpec(request_id, prompt, sampling, _MAX_TOKENS, eos_token_ids=frozenset({EOS}))


def _all_go_on(core: Scheduler) -> StepResult:
    """The result of the oldest plan in flight: one token for each slot that samples."""
    oldest = core.lanes[_EXECUTOR].inflight[0]
    slots = list(oldest.sampling_slots)
    return StepResult(
        oldest.plan.step_id, slots=slots, token_ids=[TOKEN] * len(slots), timings=StepTimings(total_ns=1000)
    )


def _wire_result(result: StepResult) -> bytes:
    return pb.StepResult(
        step_id=result.step_id,
        status=pb.STEP_STATUS_OK,
        slots=result.slots,
        token_ids=result.token_ids,
        timings=pb.StepTimings(total_ns=result.timings.total_ns),
    ).SerializeToString()


def _plan(core: Scheduler) -> StepPlan:
    plan = core.plan_step(_EXECUTOR, 0.0)
    if plan is None:
        raise BenchmarkError("the core found nothing to plan")
    return plan


def _apply(core: Scheduler, result: StepResult) -> StepOutputs:
    return core.apply_result(_EXECUTOR, result, 0.0)[1]


def _check(case: Case, plan: StepPlan, outputs: StepOutputs, num_running: int) -> None:
    """Check that every running sequence got a token, and that as many joined and ended as the case states."""
    where = f"step {plan.step_id} of {case}"
    if not plan.decode_ready or len(plan.admitted) != case.num_changing or len(outputs.finishes) != case.num_changing:
        raise BenchmarkError(f"{where}: {len(plan.admitted)} joined, {len(outputs.finishes)} ended")
    if num_running != case.running - case.num_changing or len(outputs.sequences) != len(outputs.token_ids):
        raise BenchmarkError(f"{where}: {num_running} run")
    if not case.churn and outputs.token_ids != [TOKEN] * case.running:
        raise BenchmarkError(f"{where}: {len(outputs.token_ids)} tokens instead of {case.running}")
