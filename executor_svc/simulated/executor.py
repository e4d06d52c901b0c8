"""Runs one simulated step: from a plan to its result, in a modelled time. Needs neither a thread nor a service."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import LogprobColumns, SlotError, StepResult, StepTimings
from executor_svc.batch.prompt_rows import by_slot, prompt_rows
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slot_digest import digest_of
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import Computed, Finished, SampledTokens, make_result
from executor_svc.plan.arrays import BoolArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.logits_edits import logits_edits
from executor_svc.simulated.adapters import SimulatedAdapters
from executor_svc.simulated.attention import SimulatedAttention
from executor_svc.simulated.clock import sleep_until
from executor_svc.simulated.costs import StepCosts, StepWork
from executor_svc.simulated.grouped_attention import GroupedAttention
from executor_svc.simulated.hashing import U64, draw_hashes, logits_hashes
from executor_svc.simulated.injection import InjectedDeviceError, Injection, Poison
from executor_svc.simulated.memory import DigestPools
from executor_svc.simulated.ranking import Ranking
from executor_svc.simulated.states import SimulatedStates, state_width
from executor_svc.simulated.token_choice import best_candidates, choose, prompt_columns, row_logprobs
from executor_svc.speculation.drafting import Drafting
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.verification import accept_drafts
from executor_svc.worker.adapters import AdapterLoader


class SimulatedStepExecutor:
    """The real slots and plan checks, over digests in place of keys and values."""

    start_trace = None
    """A simulated step has nothing to trace."""

    def __init__(
        self,
        limits: Limits,
        costs: StepCosts | None = None,
        wait: Callable[[int], None] = sleep_until,
        injection: Injection | None = None,
        poison: Poison | None = None,
        drafts: DraftSource | None = None,
        adapters: SimulatedAdapters | None = None,
    ) -> None:
        """wait: returns at a moment of the monotonic clock in ns; not called if all costs are 0.

        drafts: makes drafts, as many as the plans allow; None: there are none. adapters: plans may name these.
        """
        self.limits = limits
        self.slots = Slots(limits)
        width = state_width(limits.state_tail) if limits.pages_per_state else 0
        self.pools = DigestPools(limits.num_device_blocks, limits.num_host_blocks, limits.block_size, width)
        self._states = SimulatedStates(self.slots, self.pools) if limits.pages_per_state else None
        self._drafting = Drafting(self.slots, drafts)
        self._attention: SimulatedAttention | GroupedAttention = (
            GroupedAttention(self.slots, self.pools, self._states)
            if limits.kv_groups or limits.pages_per_state
            else SimulatedAttention(self.slots, self.pools)
        )
        self._costs = costs or StepCosts()
        self._wait = wait
        self._injection = injection
        self._poison = poison
        self.adapters: AdapterLoader | None = adapters
        self._adapters = adapters or SimulatedAdapters(0)
        # The end of all steps so far, in modelled time.
        self._free_ns = 0

    def clear(self) -> None:
        """Free all slots; KV stays."""
        self.slots.clear()
        self._drafting.clear()

    def is_out_of_memory(self, exc: Exception) -> bool:
        """Return whether a step failed for lack of memory."""
        return isinstance(exc, MemoryError)

    def is_lost(self, exc: Exception) -> bool:
        """Return whether an injected fault has cost this process its device, which it does not have."""
        return isinstance(exc, InjectedDeviceError)

    def launch(self, plan: StepPlan, received_ns: int) -> Finished:
        """As in `worker.Executor`; the step is done when this returns."""
        return Finished(self.execute(plan, received_ns))

    def execute(self, plan: StepPlan, received_ns: int | None = None) -> StepResult:
        """Run one step; received_ns: the plan's arrival on the monotonic clock; None: now.

        Raises InvalidPlan before anything is computed or moved.
        """
        started = time.monotonic_ns()
        received_ns = started if received_ns is None else received_ns
        if self._injection is not None:
            self._injection.before_step()
        keys = [self._adapters.key_of(sequence.adapter_index) for sequence in plan.admitted]
        self.slots.apply(plan)
        if keys:
            self._attention.adapter_keys[[sequence.slot for sequence in plan.admitted]] = np.array(keys, np.uint64)
        self._drafting.follow(plan)
        scheduled = self._drafting.add(plan, self.slots.schedule(plan))
        if self._poison is not None:
            self._poison.before_compute(self.slots, scheduled)
        moving = time.monotonic_ns()
        num_moved = self.pools.move(plan)
        moves_ns = time.monotonic_ns() - moving if num_moved else 0
        if self._states is not None and plan.admitted:
            self._states.check_admitted(plan)
        work = self._work(scheduled, num_moved)
        computed = self._compute(scheduled)
        sampled = computed.sampled
        self.slots.commit(scheduled, sampled.token_ids, sampled.valid, sampled.late)
        digest = digest_of(self.slots) if plan.debug_digest else b""
        if self._costs.instant:
            ended = time.monotonic_ns()
            timings = StepTimings(
                started - received_ns, computed.device_ns, computed.sample_ns, ended - started, moves_ns
            )
        else:
            timings = self._pass_time(work, received_ns)
        result = make_result(plan.step_id, scheduled, computed, timings, digest)
        if self._states is not None and len(scheduled.slots):
            result.saved_slots = [slot for slot, _ in self._states.saved]
            result.saved_positions = [position for _, position in self._states.saved]
        return result

    def _compute(self, scheduled: Scheduled) -> Computed:
        """Write digests, then compute prompt logprobs and choose tokens."""
        none = scheduled.slots[:0]
        if not len(scheduled.slots):
            return Computed(SampledTokens(none, none, None), none)
        if self._injection is not None:
            self._injection.before_compute()
        began = time.monotonic_ns()
        self._attention.write(scheduled)
        hashes = self._logits(scheduled)
        forward_done = time.monotonic_ns()
        prompts = self._prompt_logprobs(scheduled)
        sampled = accept_drafts(self.slots, scheduled, self._choose(scheduled, hashes))
        rows = scheduled.rows
        positions = self.slots.num_tokens[rows.slots] + (0 if rows.ahead is None else rows.ahead)
        ended = time.monotonic_ns()
        return Computed(sampled, positions, prompts, device_ns=forward_done - began, sample_ns=ended - forward_done)

    def _logits(self, scheduled: Scheduled) -> U64:
        """Return [Q] the logits hash of each of scheduled.rows: its own, or its source's for a fork."""
        slots = scheduled.logits_slots
        if not len(slots):
            return np.zeros(0, np.uint64)
        lengths = (self.slots.num_computed_tokens[scheduled.slots] + scheduled.num_tokens)[scheduled.samples]
        if scheduled.num_drafts is not None:
            num_drafts = scheduled.num_drafts[scheduled.samples]
            lengths = spans(lengths - num_drafts, 1 + num_drafts)[1]
        hashes, sources = logits_hashes(self._attention.contexts(slots, lengths)), scheduled.rows.sources
        return hashes if sources is None else hashes[sources]

    def _prompt_logprobs(self, scheduled: Scheduled) -> dict[int, LogprobColumns]:
        wanted = prompt_rows(self.slots, scheduled)
        if wanted is None:
            return {}
        hashes = logits_hashes(self._attention.prompt_contexts(wanted))
        return by_slot(wanted, prompt_columns(Ranking(hashes, self.limits.vocab_size), wanted))

    def _choose(self, scheduled: Scheduled, hashes: U64) -> SampledTokens:
        """Choose a token, or candidates where requested, for each of scheduled.rows.

        hashes: [Q], logits hashes.
        """
        rows, candidate_rows, sampling = scheduled.rows.slots, scheduled.rows.candidates, self.slots.sampling
        logits, edits = Ranking(hashes, self.limits.vocab_size), logits_edits(self.slots, rows, scheduled.rows.ahead)
        drawn = draw_hashes(
            hashes, sampling["seed"][rows], sampling["sample_index"][rows], sampling["temperature"][rows] > 0
        )
        tokens, errors = choose(Ranking(drawn, self.limits.vocab_size), edits)
        if self._injection is not None:
            errors[self._non_finite(scheduled, self._injection)] = SlotError.NON_FINITE_LOGITS
        candidates = (
            best_candidates(logits, candidate_rows, sampling["num_candidates"][rows], errors, edits)
            if len(candidate_rows)
            else None
        )
        num_top = sampling["num_logprobs"][rows]
        num_top[candidate_rows] = -1
        (wanted,) = ((num_top >= 0) & (errors == 0)).nonzero()
        logprobs = row_logprobs(logits, tokens, wanted, num_top[wanted]) if len(wanted) else None
        return SampledTokens(tokens, errors, logprobs, candidates)

    def _non_finite(self, scheduled: Scheduled, injection: Injection) -> BoolArray:
        """Return [Q]: whether the logits row that each row reads is to be taken for not finite."""
        slots, sources = scheduled.logits_slots, scheduled.rows.sources
        rows = np.zeros(len(slots), np.bool_)
        rows[injection.non_finite_rows(slots.tolist())] = True
        return rows if sources is None else rows[sources]

    def _work(self, scheduled: Scheduled, num_moved: int) -> StepWork:
        counts, context = scheduled.num_tokens, self.slots.num_computed_tokens[scheduled.slots]
        tokens = int(counts.sum())
        return StepWork(
            tokens=tokens,
            # The i-th token of a chunk attends to the context and to i tokens of the chunk.
            context_tokens=int(counts @ context) + (int(counts @ counts) + tokens) // 2,
            samples=len(scheduled.rows.slots),
            moved_blocks=num_moved,
            kv_tokens=tokens + int(context.sum()),
        )

    def _pass_time(self, work: StepWork, received_ns: int) -> StepTimings:
        """Wait until the step's modelled end. It began at its arrival or at the end of the previous step."""
        costs = self._costs
        forward_ns, sample_ns, moves_ns = costs.forward_ns(work), costs.sample_ns(work), costs.move_ns(work)
        total_ns = moves_ns + forward_ns + sample_ns
        began = max(received_ns, self._free_ns)
        self._free_ns = began + total_ns
        self._wait(self._free_ns)
        return StepTimings(began - received_ns, forward_ns, sample_ns, total_ns, moves_ns)
