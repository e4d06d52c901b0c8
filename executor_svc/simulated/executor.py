"""One simulated step: a plan in, a result out, after a modelled time. No thread and no service is needed for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from executor_svc.batch.prompt_rows import by_slot, prompt_rows
from executor_svc.batch.slots import Scheduled, Slots
from executor_svc.batch.step_result import Computed, Finished, SampledTokens, make_result
from executor_svc.plan.plan import Limits, SlotLogprobs, StepPlan, StepResult, StepTimings
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.simulated.attention import Attention
from executor_svc.simulated.choice import best_candidates, choose, prompt_columns, row_logprobs
from executor_svc.simulated.clock import sleep_until
from executor_svc.simulated.costs import StepCosts, StepWork
from executor_svc.simulated.hashing import U64, draw_hashes, logits_hashes
from executor_svc.simulated.memory import DigestPools
from executor_svc.simulated.ranking import Ranking


class SimulatedStepExecutor:
    """The real slots and plan checks, over digests in place of keys and values."""

    def __init__(
        self, limits: Limits, costs: StepCosts | None = None, wait: Callable[[int], None] = sleep_until
    ) -> None:
        """`wait` returns at a moment of the monotonic clock in ns; it is not called where nothing costs anything."""
        self.limits = limits
        self.slots = Slots(limits)
        self.pools = DigestPools(limits.num_device_blocks, limits.num_host_blocks, limits.block_size)
        self._attention = Attention(self.slots, self.pools)
        self._costs = costs or StepCosts()
        self._wait = wait
        # When the steps so far have ended, in modelled time.
        self._free_ns = 0

    def clear(self) -> None:
        """Free all slots; KV stays."""
        self.slots.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Did a step fail for want of memory."""
        return isinstance(exc, MemoryError)

    def is_lost(self, exc: Exception) -> bool:
        """There is no device to lose."""
        return False

    def start_trace(self) -> Callable[[], bytes]:
        """There is nothing to trace; raises NotImplementedError."""
        raise NotImplementedError("a simulated executor computes nothing that could be traced")

    def launch(self, plan: StepPlan, received_ns: int) -> Finished:
        """As in `worker.Executor`: the step has run when this returns."""
        return Finished(self.execute(plan, received_ns))

    def execute(self, plan: StepPlan, received_ns: int | None = None) -> StepResult:
        """Run one step; received_ns is the plan's arrival on the monotonic clock, None: now.

        Raises InvalidPlan before anything is computed or moved.
        """
        started = time.monotonic_ns()
        received_ns = started if received_ns is None else received_ns
        self.slots.apply(plan)
        scheduled = self.slots.schedule(plan)
        moving = time.monotonic_ns()
        num_moved = self.pools.move(plan)
        moves_ns = time.monotonic_ns() - moving if num_moved else 0
        work = self._work(scheduled, num_moved)
        computed = self._compute(scheduled)
        sampled = computed.sampled
        self.slots.commit(scheduled, sampled.token_ids, sampled.valid)
        digest = self.slots.digest() if plan.debug_digest else b""
        if self._costs.instant:
            ended = time.monotonic_ns()
            timings = StepTimings(
                started - received_ns, computed.device_ns, computed.sample_ns, ended - started, moves_ns
            )
        else:
            timings = self._pass_time(work, received_ns)
        return make_result(plan.step_id, scheduled, computed, timings, digest)

    def _compute(self, scheduled: Scheduled) -> Computed:
        """Write digests, then tell prompt logprobs and choose tokens."""
        none = scheduled.slots[:0]
        if not len(scheduled.slots):
            return Computed(SampledTokens(none, none, None), none)
        began = time.monotonic_ns()
        self._attention.write(scheduled)
        hashes = self._logits(scheduled)
        forward_done = time.monotonic_ns()
        prompts = self._prompt_logprobs(scheduled)
        sampled = self._choose(scheduled, hashes)
        positions = self.slots.num_tokens[scheduled.sampling_slots]
        return Computed(sampled, positions, prompts, forward_done - began, time.monotonic_ns() - forward_done)

    def _logits(self, scheduled: Scheduled) -> U64:
        """[R] the hash of the logits that each of scheduled.sampling_slots reads: its own, or a fork its source's."""
        rows = scheduled.slots[scheduled.samples]
        if not len(rows):
            return np.zeros(0, np.uint64)
        lengths = (self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens)[scheduled.samples]
        hashes = logits_hashes(self._attention.contexts(rows, lengths))
        return hashes if scheduled.sources is None else hashes[scheduled.sources]

    def _prompt_logprobs(self, scheduled: Scheduled) -> tuple[SlotLogprobs, ...]:
        asked = prompt_rows(self.slots, scheduled)
        if asked is None:
            return ()
        hashes = logits_hashes(self._attention.prompt_contexts(asked))
        return by_slot(asked, prompt_columns(Ranking(hashes, self.limits.vocab_size), asked))

    def _choose(self, scheduled: Scheduled, hashes: U64) -> SampledTokens:
        """A token for each of scheduled.sampling_slots [R], candidates for those that ask; hashes: of their logits."""
        rows, told, sampling = scheduled.sampling_slots, scheduled.candidates, self.slots.sampling
        logits, edits = Ranking(hashes, self.limits.vocab_size), logits_edits(self.slots, rows)
        drawn = draw_hashes(
            hashes, sampling["seed"][rows], sampling["sample_index"][rows], sampling["temperature"][rows] > 0
        )
        tokens, errors = choose(Ranking(drawn, self.limits.vocab_size), edits)
        candidates = (
            best_candidates(logits, told, sampling["num_candidates"][rows], errors, edits) if len(told) else None
        )
        num_top = sampling["num_logprobs"][rows]
        num_top[told] = -1
        asked = np.flatnonzero((num_top >= 0) & (errors == 0))
        logprobs = row_logprobs(logits, tokens, asked, num_top[asked]) if len(asked) else None
        return SampledTokens(tokens, errors, logprobs, candidates)

    def _work(self, scheduled: Scheduled, num_moved: int) -> StepWork:
        counts, context = scheduled.num_tokens, self.slots.num_computed_tokens[scheduled.slots]
        return StepWork(
            tokens=int(counts.sum()),
            context_tokens=int((counts * context + counts * (counts + 1) // 2).sum()),
            samples=len(scheduled.sampling_slots),
            moved_blocks=num_moved,
            kv_tokens=int((counts + context).sum()),
        )

    def _pass_time(self, work: StepWork, received_ns: int) -> StepTimings:
        """Wait until the step would have ended; it began when it had arrived and the step before had ended."""
        costs = self._costs
        forward_ns, sample_ns, moves_ns = costs.forward_ns(work), costs.sample_ns(work), costs.move_ns(work)
        total_ns = moves_ns + forward_ns + sample_ns
        began = max(received_ns, self._free_ns)
        self._free_ns = began + total_ns
        self._wait(self._free_ns)
        return StepTimings(began - received_ns, forward_ns, sample_ns, total_ns, moves_ns)
