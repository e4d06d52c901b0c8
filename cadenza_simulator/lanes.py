"""An executor in virtual time for one lane of the core: how long a step takes, its result, and when the result
arrives."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator

from cadenza_common.plan.result import Candidates, StepResult, StepTimings
from cadenza_loadtest.seeds import stream
from cadenza_simulator.executor_profiles import ExecutorProfile
from executor_svc.sampling.splitmix64 import GAMMA, MASK, mix
from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.tokens import rank_logprob
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.sequences.decode_batch import DecodeBatch
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.plan_loop.pacing import StepPacer

TOKEN = 1
"""The token that every sequence samples: token values make no difference to a cost model."""
_VOCAB_SIZE = 32_768
_DRAWS_AT_ONCE = 4096
StepCostFunction = Callable[[int, int, int, int, int], tuple[int, int, int]]


class CountingDecodeBatch(DecodeBatch):
    """A decode batch that keeps how much the newest step reads."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.num_read = 0
        """Positions that the members' tokens of the newest step read, each token's own included."""

    def advance(self) -> list[Sequence]:
        """Every member computes one token."""
        ending = super().advance()
        self.num_read = self.num_computed_tokens
        return ending


class InflightStep:
    """A step between its plan and its result."""

    __slots__ = ("duration_s", "num_tokens", "result", "result_at", "row", "starting")

    def __init__(self, result: StepResult, result_at: float, num_tokens: int, duration_s: float) -> None:
        self.result = result
        self.result_at = result_at
        """When the scheduler receives the result."""
        self.num_tokens = num_tokens
        self.duration_s = duration_s
        self.starting: list[Sequence] = []
        """Sequences whose first token since they joined the batch is in the result."""
        self.row: tuple[float, ...] | None = None
        """The step's row of StepRows without the time of its end, if it is kept."""


class SimulatedLane:
    """A simulated executor, and the plan loop's state for it."""

    def __init__(
        self, index: int, profile: ExecutorProfile, core: Lane, max_inflight_plans: int, seed: int = 0
    ) -> None:
        self.index = index
        self.profile = profile
        self.core = core
        self.decode_batch = CountingDecodeBatch(core.spec.block_size)
        core.decode_batch = self.decode_batch
        self.limit = min(max_inflight_plans, profile.limits.max_inflight_plans)
        self.plan_s = profile.overheads.plan_us / 1e6
        self.pacer = StepPacer()
        self.inflight_steps: deque[InflightStep] = deque()
        self.plan_at = math.inf
        """When the plan loop plans next; inf: after the next event."""
        self.idle = True
        """Whether the last attempt found nothing to plan."""
        self.num_applied = 0
        self.applied = array("d")
        """When each step's result was applied; filled only if gaps are kept."""
        self._step_cost = step_cost_function(profile.costs)
        self._free_at = 0.0
        noise = profile.noise
        self._vary = varied(noise.step_us / 1e6, seed, f"steps {index}") if noise.step_us else None
        self._overhead_factors = factors(noise.overheads, seed, f"overheads {index}") if noise.overheads else None
        self._transit_s = profile.overheads.transit_us / 1e6
        self._tokens = [TOKEN] * profile.limits.max_num_seqs
        self._joined_decode_batch: list[Sequence] = []
        """Sequences that decode from the next step on without having sampled before: one token of their prompt was
        left."""

    @property
    def next_at(self) -> float:
        """When the next event of this lane happens."""
        inflight_steps = self.inflight_steps
        if inflight_steps and inflight_steps[0].result_at <= self.plan_at:
            return inflight_steps[0].result_at
        return self.plan_at

    def launch(self, step: PlannedStep, planned_at: float, *, beams: bool) -> InflightStep:
        """Start a step; `beams`: whether the step may hold beams."""
        decode_batch, slots, plan = self.decode_batch, step.decode_slots, step.plan
        num_tokens = len(slots)
        num_read = num_kv = decode_batch.num_read if num_tokens else 0
        starting: list[Sequence] = []
        if self._joined_decode_batch:
            starting = [sequence for sequence in self._joined_decode_batch if sequence not in step.preempted]
            self._joined_decode_batch = []
        if step.chunks:
            slots = step.sampling_slots
            for chunk in step.chunks:
                count, context_len = chunk.num_tokens, chunk.context_len
                num_tokens += count
                num_read += count * context_len + count * (count + 1) // 2
                num_kv += count + context_len if count else 0  # a fork computes nothing
                if chunk.samples:
                    starting.append(chunk.sequence)
                elif chunk.sequence.is_decoding:
                    self._joined_decode_batch.append(chunk.sequence)
        num_moved = len(plan.swap_out) + len(plan.copies) + len(plan.swap_in)
        forward_ns, sample_ns, moves_ns = self._step_cost(num_tokens, num_read, num_kv, len(slots), num_moved)
        candidates = _candidates(step) if beams else {}
        if candidates:
            slots = [slot for slot in slots if slot not in candidates]
        duration_s = (forward_ns + sample_ns + moves_ns) / 1e9
        if self._vary is not None and duration_s:
            duration_s = self._vary(duration_s)
        there_s, back_s = self.plan_s + self._transit_s, self._transit_s
        if self._overhead_factors is not None:
            made = self._overhead_factors
            there_s = next(made) * self.plan_s + next(made) * self._transit_s
            back_s *= next(made)
        self._free_at = max(planned_at + there_s, self._free_at) + duration_s
        result = StepResult(
            plan.step_id,
            slots=slots,
            token_ids=self._tokens[: len(slots)],
            candidates=candidates,
            timings=StepTimings(
                device_ns=forward_ns, sample_ns=sample_ns, moves_ns=moves_ns, total_ns=round(1e9 * duration_s)
            ),
        )
        # Results come in the order of their plans.
        before = self.inflight_steps[-1].result_at if self.inflight_steps else 0.0
        inflight_step = InflightStep(result, max(before, self._free_at + back_s), num_tokens, duration_s)
        inflight_step.starting = starting
        self.inflight_steps.append(inflight_step)
        if len(self.inflight_steps) == 1:
            self.pacer.started(planned_at)
        return inflight_step

    def take_result(self, now: float) -> InflightStep:
        """Remove and return the first step, whose result has arrived."""
        inflight_step = self.inflight_steps.popleft()
        self.num_applied += 1
        self.pacer.observe(inflight_step.num_tokens, inflight_step.duration_s)
        self.pacer.started(now)
        return inflight_step

    def pace(self, now: float) -> None:
        """Set when to plan next, as PlanLoop does: at once if the executor is idle, late in its step if it is busy."""
        inflight_steps = self.inflight_steps
        if not inflight_steps:
            self.plan_at = now
        elif len(inflight_steps) < self.limit:
            self.plan_at = max(now, self.pacer.due(inflight_steps[0].num_tokens))
        else:
            self.plan_at = math.inf

    def num_stored_tokens(self, *, alone: bool) -> int:
        """Tokens whose KV the pool stores for running sequences; `alone`: whether every request has one sequence."""
        core = self.core
        if not alone or core.blocks.num_shared_refs:
            return core.num_stored_tokens
        return self.decode_batch.num_computed_tokens + sum(sequence.num_computed_tokens for sequence in core.prefilling)


def _candidates(step: PlannedStep) -> dict[int, Candidates]:
    """Synthetic candidates for the step's beams, with the same logprobs as the simulated executor's."""
    found: dict[int, Candidates] = {}
    for chunk in step.chunks:
        beam = chunk.sequence
        if not chunk.samples or (search := beam.group.beam_search) is None:
            continue
        value = mix((beam.sequence_id * GAMMA + beam.num_planned_tokens) & MASK)
        ranks = range(search.num_candidates)
        found[chunk.slot] = Candidates(
            token_ids=[2 + rank for rank in ranks],
            logprobs=[rank_logprob(value, rank, _VOCAB_SIZE) for rank in ranks],
        )
    return found


def factors(variation: float, seed: int, name: str) -> Iterator[float]:
    """Endless random numbers of mean 1 and this coefficient of variation, which must be over 0.

    The numbers of different names are independent.
    """
    rng, shape = stream(seed, name), 1 / variation**2
    while True:
        yield from (rng.standard_gamma(shape, _DRAWS_AT_ONCE) / shape).tolist()


def varied(scale: float, seed: int, name: str) -> Callable[[float], float]:
    """A function that draws a number of a given mean, over 0; its variance is `scale` times the mean."""
    draw: Callable[[float], float] = stream(seed, name).standard_gamma
    return lambda mean: scale * draw(mean / scale)


def step_cost_function(costs: StepCosts) -> StepCostFunction:
    """Returns a function of (tokens, context_tokens, kv_tokens, samples, moved_blocks), which mean the same as in
    `StepWork`.

    The function returns nanoseconds: (forward_ns, sample_ns, move_ns), as the methods of `StepCosts` do.
    """
    step_us, token_us, hidden_tokens = costs.step_us, costs.token_us, costs.hidden_tokens
    context_token_us, kv_token_us = costs.context_token_us, costs.kv_token_us
    sample_us, moved_block_us = costs.sample_us, costs.moved_block_us

    def price(
        tokens: int, context_tokens: int, kv_tokens: int, samples: int, moved_blocks: int
    ) -> tuple[int, int, int]:
        us = step_us + token_us * (tokens - hidden_tokens) if tokens > hidden_tokens else step_us
        us += context_token_us * context_tokens + kv_token_us * kv_tokens
        moves = round(1000 * moved_block_us * moved_blocks) if moved_blocks else 0
        return round(1000 * us), round(1000 * sample_us * samples), moves

    return price
