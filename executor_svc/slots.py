"""Batch slots: the mirror of what plans have told, as arrays with a row per slot.

Work per plan follows what the plan changes, plus a few array operations over the batch. `Slots.apply` takes the parts
of a plan in the order that execution.proto states; block operations touch no slot, so they run after the whole plan has
been found valid. Every contradiction raises InvalidPlan; the slots are then undefined until `clear`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from executor_svc.plan import (
    AdmittedSequence,
    BoolArray,
    IntArray,
    InvalidPlan,
    Limits,
    ScheduledTokens,
    SlotColumns,
    StepPlan,
)
from executor_svc.plan_checks import (
    check_admission,
    check_block_moves,
    check_range,
    check_supported,
    check_unique,
)


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What one step computes, slots ascending."""

    slots: IntArray
    """[S] slots with one token or more to compute."""
    num_tokens: IntArray
    """[S]."""
    samples: BoolArray
    """[S]: does it sample after its last token."""
    idle_slots: IntArray
    """Slots that the plan lets sample but that have stopped: they compute nothing and report no token."""


class Slots:
    """State of all slots. Array shapes name n = num_slots; token and block ids are int32."""

    def __init__(self, limits: Limits) -> None:
        n = limits.num_slots
        self.limits = limits
        # Pages of these two are touched only as sequences grow. One column more than a sequence may compute: for the
        # token that is sampled last.
        self.token_ids = np.zeros((n, limits.max_model_len + 1), np.int32)
        self.block_tables = np.zeros((n, limits.max_blocks_per_seq), np.int32)
        self.num_tokens = np.zeros(n, np.int64)
        self.num_prompt_tokens = np.zeros(n, np.int64)
        self.num_computed_tokens = np.zeros(n, np.int64)
        self.num_blocks = np.zeros(n, np.int64)
        self.admitted = np.zeros(n, np.bool_)
        self.held = np.zeros(n, np.bool_)
        # Has sampled a stop token, or failed alone: computes nothing more.
        self.stopped = np.zeros(n, np.bool_)
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.top_k = np.zeros(n, np.int64)
        self.log_min_p = np.full(n, -np.inf, np.float32)
        self.seed = np.zeros(n, np.uint64)
        self.sample_index = np.zeros(n, np.int64)
        self.min_tokens = np.zeros(n, np.int64)
        self.num_logprobs = np.full(n, -1, np.int64)
        # Stop ids plus one, so that the padding is 0 and costs no page.
        self.stop_ids = np.zeros((n, 8), np.int32)
        self.num_stop_ids = np.zeros(n, np.int64)

    def clear(self) -> None:
        """Free every slot."""
        self.admitted[:] = False

    def ready(self) -> BoolArray:
        """[n]: admitted, not held, not stopped, and lacking the KV of exactly one known token."""
        one_left = self.num_tokens - self.num_computed_tokens == 1
        result: BoolArray = self.admitted & ~self.held & ~self.stopped & one_left
        return result

    def apply(self, plan: StepPlan) -> None:
        """Take all parts of the plan up to given tokens; block operations are only checked."""
        check_supported(plan)
        self._release(plan.released_slots)
        check_block_moves(plan, self.limits)
        for sequence in plan.admitted:
            self._admit(sequence)
        self._append_blocks(plan.appends)
        self._check_admitted(plan.held_slots, "held_slots")
        self.held[plan.held_slots] = True
        self._check_admitted(plan.resumed_slots, "resumed_slots")
        self.held[plan.resumed_slots] = False
        self._give(plan.given)

    def _check_admitted(self, slots: IntArray, part: str) -> None:
        check_range(slots, self.limits.num_slots, f"{part}: slot")
        if not self.admitted[slots].all():
            raise InvalidPlan(f"{part}: slot {slots[~self.admitted[slots]][0]} is not admitted")

    def _release(self, slots: IntArray) -> None:
        self._check_admitted(slots, "released_slots")
        check_unique(slots, "released_slots: slot")
        self.admitted[slots] = False

    def _admit(self, sequence: AdmittedSequence) -> None:
        check_admission(sequence, self.limits)
        slot, sampling = sequence.slot, sequence.sampling
        if self.admitted[slot]:
            raise InvalidPlan(f"admitted: slot {slot} is not free")
        num_tokens, num_blocks = len(sequence.token_ids), len(sequence.block_ids)
        self.token_ids[slot, :num_tokens] = sequence.token_ids
        self.block_tables[slot, :num_blocks] = sequence.block_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self.num_blocks[slot] = num_blocks
        self.admitted[slot] = True
        self.held[slot] = sequence.held
        self.stopped[slot] = False
        self.temperature[slot] = sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.log_min_p[slot] = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
        self.seed[slot] = sampling.seed
        self.sample_index[slot] = sampling.sample_index
        self.min_tokens[slot] = sampling.min_tokens
        self.num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self._set_stop_ids(slot, sampling.stop_token_ids)

    def _set_stop_ids(self, slot: int, ids: IntArray) -> None:
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.zeros((len(self.stop_ids), max(len(ids), 2 * self.stop_ids.shape[1])), np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot, : len(ids)] = ids + 1
        # Behind the new ids those of an earlier sequence would remain.
        self.stop_ids[slot, len(ids) : max(len(ids), int(self.num_stop_ids[slot]))] = 0
        self.num_stop_ids[slot] = len(ids)

    def _append_blocks(self, appends: SlotColumns) -> None:
        if not len(appends.slots):
            return
        self._check_admitted(appends.slots, "appends")
        check_range(appends.values, self.limits.num_device_blocks, "appends: block")
        order = np.argsort(appends.slots, kind="stable")
        slots, blocks = appends.slots[order], appends.values[order]
        _, first, counts = np.unique(slots, return_index=True, return_counts=True)
        places = self.num_blocks[slots] + np.arange(len(slots)) - np.repeat(first, counts)
        if places.max() >= self.limits.max_blocks_per_seq:
            slot = slots[places.argmax()]
            raise InvalidPlan(
                f"appends: the block table of slot {slot} would exceed {self.limits.max_blocks_per_seq} blocks"
            )
        self.block_tables[slots, places] = blocks
        self.num_blocks[slots[first]] += counts

    def _give(self, given: SlotColumns) -> None:
        slots = given.slots
        if not len(slots):
            return
        self._check_admitted(slots, "given")
        check_unique(slots, "given: slot")
        check_range(given.values, self.limits.vocab_size, "given: token id")
        known = self.num_tokens[slots]
        unfinished = known != self.num_computed_tokens[slots]
        if unfinished.any():
            raise InvalidPlan(f"given: slot {slots[unfinished][0]} has known tokens that are not computed")
        if known.max() > self.limits.max_model_len:
            raise InvalidPlan(f"given: slot {slots[known.argmax()]} has max_model_len tokens already")
        self.token_ids[slots, known] = given.values
        self.num_tokens[slots] += 1

    def schedule(self, plan: StepPlan) -> Scheduled:
        """What the plan computes, after `apply`: the explicit slots and, if asked for, every other ready slot."""
        part, n = plan.scheduled, self.limits.num_slots
        self._check_scheduled(part)
        counts = np.zeros(n, np.int64)
        samples = np.zeros(n, np.bool_)
        if plan.decode_ready:
            ready = self.ready()
            counts[ready] = 1
            samples[ready] = True
        stopped = self.stopped[part.slots]
        counts[part.slots] = np.where(stopped, 0, part.num_tokens)
        samples[part.slots] = part.samples
        slots = np.flatnonzero(counts)
        scheduled = Scheduled(slots, counts[slots], samples[slots], np.sort(part.slots[stopped & part.samples]))
        self._check_room(scheduled)
        return scheduled

    def _check_scheduled(self, part: ScheduledTokens) -> None:
        """Explicit counts must fit what is known; a stopped slot computes nothing, so any count is an upper bound."""
        if not len(part.slots):
            return
        self._check_admitted(part.slots, "scheduled")
        check_unique(part.slots, "scheduled: slot")
        left = self.num_tokens[part.slots] - self.num_computed_tokens[part.slots]
        running = ~self.stopped[part.slots]
        over = running & (part.num_tokens > left)
        if over.any():
            i = over.argmax()
            raise InvalidPlan(
                f"scheduled: slot {part.slots[i]} is to compute {part.num_tokens[i]} tokens, but only {left[i]} of its "
                "known tokens are not computed"
            )
        early = running & part.samples & ((part.num_tokens < left) | (part.num_tokens == 0))
        if early.any():
            i = early.argmax()
            raise InvalidPlan(
                f"scheduled: slot {part.slots[i]} is to sample after {part.num_tokens[i]} of {left[i]} tokens that are "
                "not computed: it must compute all its known tokens, and one at least"
            )

    def _check_room(self, scheduled: Scheduled) -> None:
        """The step must fit the limits, and each sequence its block table and max_model_len."""
        limits = self.limits
        slots, counts = scheduled.slots, scheduled.num_tokens
        if len(slots) > limits.max_num_seqs:
            raise InvalidPlan(f"{len(slots)} sequences are scheduled: over max_num_seqs {limits.max_num_seqs}")
        if counts.sum() > limits.max_num_batched_tokens:
            raise InvalidPlan(
                f"{counts.sum()} tokens are scheduled: over max_num_batched_tokens {limits.max_num_batched_tokens}"
            )
        ends = self.num_computed_tokens[slots] + counts
        too_long = ends > limits.max_model_len
        if too_long.any():
            raise InvalidPlan(f"slot {slots[too_long][0]} would exceed max_model_len {limits.max_model_len}")
        short = ends > self.num_blocks[slots] * limits.block_size
        if short.any():
            i = short.argmax()
            raise InvalidPlan(
                f"the block table of slot {slots[i]} is too short: {ends[i]} tokens need more than its "
                f"{self.num_blocks[slots[i]]} blocks"
            )

    def commit(self, scheduled: Scheduled, token_ids: IntArray, valid: BoolArray) -> None:
        """After the step: context lengths grow by what was computed, sampled tokens become known.

        token_ids and valid: [R], for the slots that sample; a slot without a valid token has failed and stops.
        """
        self.num_computed_tokens[scheduled.slots] += scheduled.num_tokens
        slots = scheduled.slots[scheduled.samples]
        self.stopped[slots[~valid]] = True
        slots, token_ids = slots[valid], token_ids[valid]
        places = self.num_tokens[slots]
        self.token_ids[slots, places] = token_ids
        self.num_tokens[slots] = places + 1
        widths = self.num_stop_ids[slots]
        if len(slots) and (width := int(widths.max())):
            hit = (self.stop_ids[slots, :width] == token_ids[:, None] + 1).any(axis=1)
            enough = places + 1 - self.num_prompt_tokens[slots] >= self.min_tokens[slots]
            self.stopped[slots[hit & enough]] = True

    def digest(self) -> bytes:
        """SHA-256 over the admitted slots in order.

        For each, little-endian int32: slot, num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks; then its
        token ids; then its block table.
        """
        sha = hashlib.sha256()
        for slot in np.flatnonzero(self.admitted):
            num_tokens, num_blocks = self.num_tokens[slot], self.num_blocks[slot]
            counts = (slot, num_tokens, self.num_prompt_tokens[slot], self.num_computed_tokens[slot], num_blocks)
            sha.update(np.array(counts, "<i4").tobytes())
            sha.update(self.token_ids[slot, :num_tokens].astype("<i4").tobytes())
            sha.update(self.block_tables[slot, :num_blocks].astype("<i4").tobytes())
        return sha.digest()
