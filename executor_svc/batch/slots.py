"""Batch slots: the state of sequences as plans describe it, in arrays with a row per slot.

The work per plan is proportional to its changes, plus a few array operations over the batch. `Slots.apply` handles the
parts of a plan in the order of execution.proto. Block operations change no slot, so they run after the whole plan has
been checked. Every contradiction raises InvalidPlan; the slots are then undefined until `clear`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import AdmittedSequence, StateSaves, StepPlan
from executor_svc.batch.block_tables import TablePlaces, check_appends
from executor_svc.batch.forks import check_forks, with_forks
from executor_svc.batch.plan_checks import (
    changes_ready,
    changes_slots,
    check_admission,
    check_block_moves,
    check_supported,
)
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import NamedSlots, Scheduled, check_counts, named_slots, one_each
from executor_svc.batch.slot_sampling import SlotSampling
from executor_svc.batch.slot_states import SlotStates
from executor_svc.batch.writes import Writes
from executor_svc.plan.arrays import BoolArray, IntArray, check_range, check_unique, column, ints
from executor_svc.plan.limits import Limits


class Slots:
    """State of all slots. Array shapes name n = num_slots; token and block ids are int32."""

    def __init__(self, limits: Limits, compared: bool = False) -> None:
        """compared: whether ranks compare `writes`."""
        n = limits.num_slots
        self.limits = limits
        # Pages of these two are written only as sequences grow. token_ids has one column more than a sequence may
        # compute: for the last sampled token.
        self.token_ids = np.zeros((n, limits.max_model_len + 1), np.int32)
        self.tables = np.zeros((n, limits.num_tables, limits.max_blocks_per_seq), np.int32)
        self.tables_version = 0
        """Grows with each change of `tables`."""
        self.num_tokens = np.zeros(n, np.int64)
        self.num_prompt_tokens = np.zeros(n, np.int64)
        self.num_computed_tokens = np.zeros(n, np.int64)
        self.places = TablePlaces(limits)
        self.max_drafts = np.zeros(n, np.int64)
        # The slot's LoRA adapter; 0: none.
        self.adapter_index = np.zeros(n, np.int64)
        # The number of tokens at which a slot with drafts stops.
        self.max_len = np.zeros(n, np.int64)
        self.admitted = np.zeros(n, np.bool_)
        self.held = np.zeros(n, np.bool_)
        # The slot has sampled a stop token or has failed, and computes nothing more.
        self.stopped = np.zeros(n, np.bool_)
        # The slot's prompt logits were not finite: it fails when it samples.
        self.prompt_failed = np.zeros(n, np.bool_)
        self.sampling = SlotSampling(limits)
        self.states = SlotStates(limits)
        self.writes = Writes(kept=compared)
        """Of tokens, blocks and admissions."""
        self._decoding: Scheduled | None = None
        """The work of a plan that only lets ready slots go on, until another plan or a token changes who is ready."""

    @property
    def block_tables(self) -> NDArray[np.int32]:
        """[n, max_blocks_per_seq]: the first of each slot's tables, the only one of models with one KV group."""
        return self.tables[:, 0]

    @property
    def num_blocks(self) -> IntArray:
        """[n]: blocks of this table."""
        first: IntArray = self.places.num_blocks[0]
        return first

    def clear(self) -> None:
        """Free every slot."""
        self._decoding = None
        self.writes.clear()
        self.admitted[:] = False
        self.sampling.clear()
        self.states.clear()

    def ready(self) -> BoolArray:
        """Return [n]: whether a slot is admitted, neither held nor stopped, and lacks the KV of exactly one token."""
        one_left = self.num_tokens - self.num_computed_tokens == 1
        result: BoolArray = self.admitted & ~self.held & ~self.stopped & one_left
        return result

    def apply(self, plan: StepPlan) -> StepPlan:
        """Apply all parts of the plan up to the given tokens; block operations are only checked.

        Returns the plan with complete admissions: no sequence has a source.
        """
        check_supported(plan, self.limits)
        check_block_moves(plan, self.limits)
        if not changes_slots(plan):
            return plan
        if changes_ready(plan):
            self._decoding = None
        self._release(ints(plan.released_slots))
        if any(sequence.source is not None for sequence in plan.admitted):
            plan = replace(plan, admitted=[self._admit_with_source(sequence) for sequence in plan.admitted])
        else:
            for sequence in plan.admitted:
                self._admit(sequence)
        self._check_adapters(plan)
        self._append_blocks(plan)
        self._hold(ints(plan.held_slots), True, "held_slots")
        self._hold(ints(plan.resumed_slots), False, "resumed_slots")
        self._append_given(ints(plan.given_slots), ints(plan.given_token_ids))
        self._arm_saves(plan.state_saves)
        return plan

    def _check_adapters(self, plan: StepPlan) -> None:
        """Check the number of distinct adapters of admitted slots, after admissions that bring any."""
        if not any(sequence.adapter_index for sequence in plan.admitted):
            return
        count = len(np.unique(self.adapter_index[self.admitted & (self.adapter_index != 0)]))
        if count > self.limits.max_loras:
            raise InvalidPlan(f"admitted: slots have {count} adapters, over max_loras {self.limits.max_loras}")

    def check_admitted(self, slots: IntArray, part: str) -> None:
        """Check that slots [n] are admitted; raises InvalidPlan, whose message begins with `part`."""
        check_range(slots, self.limits.num_slots, f"{part}: slot")
        if not self.admitted[slots].all():
            raise InvalidPlan(f"{part}: slot {slots[~self.admitted[slots]][0]} is not admitted")

    def _hold(self, slots: IntArray, hold: bool, part: str) -> None:
        if len(slots):
            self.check_admitted(slots, part)
            self.held[slots] = hold

    def _release(self, slots: IntArray) -> None:
        if not len(slots):
            return
        self.check_admitted(slots, "released_slots")
        check_unique(slots, "released_slots: slot")
        self.admitted[slots] = False
        self.sampling.release(slots)
        self.states.release(slots)

    def _admit_with_source(self, sequence: AdmittedSequence) -> AdmittedSequence:
        """Admit a sequence with the first tokens and blocks of its source; returns it without a source."""
        source = sequence.source
        if source is not None:
            where = f"admitted: slot {sequence.slot}: source"
            self.check_admitted(np.array([source.slot]), where)
            num_tokens, strips = self.num_prompt_tokens[source.slot], self.limits.groups[0].pages_per_block
            num_blocks = self.num_blocks[source.slot] * strips
            if source.num_tokens > num_tokens or source.num_blocks > num_blocks:
                raise InvalidPlan(
                    f"{where} {source.slot} has {num_tokens} prompt tokens and {num_blocks} blocks, not "
                    f"{source.num_tokens} and {source.num_blocks}"
                )
            if sequence.adapter_index != self.adapter_index[source.slot]:
                raise InvalidPlan(f"{where} {source.slot} has another adapter than {sequence.adapter_index}")
            first_ids = self.token_ids[source.slot, : source.num_tokens]
            first_blocks = self.tables[source.slot, :strips].T[: -(-source.num_blocks // strips)].reshape(-1)
            sequence = replace(
                sequence,
                token_ids=column(np.concatenate((first_ids, ints(sequence.token_ids)), dtype=np.int64)),
                block_ids=column(
                    np.concatenate((first_blocks[: source.num_blocks], ints(sequence.block_ids)), dtype=np.int64)
                ),
                source=None,
            )
        self._admit(sequence)
        return sequence

    def _admit(self, sequence: AdmittedSequence) -> None:
        check_admission(sequence, self.limits)
        slot = sequence.slot
        if self.admitted[slot]:
            raise InvalidPlan(f"admitted: slot {slot} is not free")
        token_ids = ints(sequence.token_ids)
        num_tokens = len(token_ids)
        self.token_ids[slot, :num_tokens] = token_ids
        self.num_tokens[slot] = num_tokens
        self.num_prompt_tokens[slot] = sequence.num_prompt_tokens
        self.num_computed_tokens[slot] = sequence.num_computed_tokens
        self.max_drafts[slot] = sequence.max_drafts
        self.adapter_index[slot] = sequence.adapter_index
        self.max_len[slot] = sequence.max_len or self.limits.max_model_len
        self.admitted[slot] = True
        self.held[slot] = sequence.held
        self.stopped[slot] = False
        self.prompt_failed[slot] = False
        self.sampling.admit(sequence)
        counts = slot, sequence.num_prompt_tokens, sequence.max_drafts, sequence.adapter_index, self.max_len[slot]
        self.writes.add(counts, token_ids)
        self.tables_version += 1
        for table, first, pages in self.places.admitted(sequence):
            self.tables[slot, table, first : first + len(pages)] = pages
            self.writes.add((table, first), pages)
        if len(sequence.state_pages):
            self.states.tables[slot] = sequence.state_pages
            self.writes.add(sequence.state_pages)

    def _append_blocks(self, plan: StepPlan) -> None:
        for named in (plan.append_slots, *(appends.slots for appends in plan.group_appends)):
            if len(named):
                self.check_admitted(ints(named), "appends")
        check_appends(plan, self.limits)
        for table, slots, places, pages in self.places.appended(plan):
            self.tables_version += 1
            self.tables[slots, table, places] = pages
            self.writes.add((table,), slots, places, pages)

    def _append_given(self, slots: IntArray, token_ids: IntArray) -> None:
        if not len(slots):
            return
        self.check_admitted(slots, "given")
        check_unique(slots, "given: slot")
        check_range(token_ids, self.limits.vocab_size, "given: token id")
        known = self.num_tokens[slots]
        unfinished = known != self.num_computed_tokens[slots]
        if unfinished.any():
            raise InvalidPlan(f"given: slot {slots[unfinished][0]} has known tokens that are not computed")
        if known.max() > self.limits.max_model_len:
            raise InvalidPlan(f"given: slot {slots[known.argmax()]} has max_model_len tokens already")
        self.num_tokens[slots] += 1
        self._write_tokens(slots, known, token_ids)

    def _arm_saves(self, saves: StateSaves) -> None:
        if not saves:
            return
        slots = ints(saves.slots)
        self.check_admitted(slots, "state_saves")
        # A step may have taken drafts that the scheduler does not know of: then a position may have been passed.
        stands = self.num_computed_tokens - self.limits.state_tail
        self.states.arm(saves, np.where(self.max_drafts > 0, 0, stands))
        self.writes.add(slots, saves.positions, saves.page_ids)

    def schedule(self, plan: StepPlan) -> Scheduled:
        """Return the work of an applied plan: its explicit slots and, with decode_ready, every other ready slot."""
        if plan.decode_ready and not len(plan.scheduled_slots) and not len(plan.fork_slots):
            return self._schedule_ready()
        self._decoding = None
        part, forks = named_slots(plan), ints(plan.fork_slots)
        self._check_scheduled(part)
        check_forks(self, plan, part)
        slots = part.slots[:0]
        if plan.decode_ready:
            ready = self.ready()
            ready[forks] = False
            ready[part.slots] = False
            (slots,) = ready.nonzero()
        counts, samples = np.ones(len(slots), np.int64), np.ones(len(slots), np.bool_)
        idle, sources = part.slots, None
        if len(part.slots):
            stopped = self.stopped[part.slots]
            idle = np.sort(part.slots[stopped & part.samples])
            computing = ~stopped & (part.num_tokens != 0)
            slots = np.concatenate((slots, part.slots[computing]))
            order = np.argsort(slots)
            slots = slots[order]
            counts = np.concatenate((counts, part.num_tokens[computing]))[order]
            samples = np.concatenate((samples, part.samples[computing]))[order]
        readers = slots[samples]
        if len(forks):
            readers, sources, idle = with_forks(self, plan, readers, idle)
        (candidates,) = self.sampling["num_candidates"][readers].nonzero()
        scheduled = Scheduled(slots, counts, samples, idle, readers, sources, candidates)
        self._check_limits(scheduled)
        return scheduled

    def _schedule_ready(self) -> Scheduled:
        """Return what `schedule` does for a plan without explicit slots; while the same slots are ready, the same."""
        scheduled = self._decoding
        if scheduled is None:
            (slots,) = self.ready().nonzero()
            (candidates,) = self.sampling["num_candidates"][slots].nonzero()
            scheduled = one_each(slots, candidates, is_greedy=bool(self.sampling.greedy[slots].all()))
            self._check_counts(scheduled)
            if not len(candidates):  # they wait for a token of a plan
                self._decoding = scheduled
        self._check_ends(scheduled)
        return scheduled

    def _check_scheduled(self, part: NamedSlots) -> None:
        """Check explicit counts against known tokens. A stopped slot computes nothing, so it accepts any count."""
        if not len(part.slots):
            return
        self.check_admitted(part.slots, "scheduled")
        check_unique(part.slots, "scheduled: slot")
        left = self.num_tokens[part.slots] - self.num_computed_tokens[part.slots]
        check_counts(part, left, ~self.stopped[part.slots])

    def _check_limits(self, scheduled: Scheduled) -> None:
        """Check the step against the limits, and each sequence against its block table and max_model_len."""
        self._check_counts(scheduled)
        self._check_ends(scheduled)

    def _check_counts(self, scheduled: Scheduled) -> None:
        limits = self.limits
        slots, counts = scheduled.slots, scheduled.num_tokens
        if len(slots) > limits.max_num_seqs:
            raise InvalidPlan(f"{len(slots)} sequences are scheduled: over max_num_seqs {limits.max_num_seqs}")
        if counts.sum() > limits.max_num_batched_tokens:
            raise InvalidPlan(
                f"{counts.sum()} tokens are scheduled: over max_num_batched_tokens {limits.max_num_batched_tokens}"
            )
        num_rows = len(scheduled.sampling_slots)
        if num_rows > limits.max_num_seqs:
            raise InvalidPlan(f"forks: {num_rows} slots would sample: over max_num_seqs {limits.max_num_seqs}")

    def _check_ends(self, scheduled: Scheduled) -> None:
        slots = scheduled.slots
        ends = self.num_computed_tokens[slots] + scheduled.num_tokens
        too_long = ends > self.limits.max_model_len
        if too_long.any():
            raise InvalidPlan(f"slot {slots[too_long][0]} would exceed max_model_len {self.limits.max_model_len}")
        self.places.check_room(slots, ends)

    def put_drafts(self, slots: IntArray, counts: IntArray, token_ids: IntArray) -> None:
        """Write drafts behind the known tokens of n slots: a step computes them, and none is known before `commit`.

        counts: [n]; token_ids: [counts.sum()], joined in the order of slots.
        """
        owner, places = spans(self.num_tokens[slots], counts)
        self.token_ids[slots[owner], places] = token_ids
        self.writes.add(slots[owner], places, token_ids)

    def commit(
        self, scheduled: Scheduled, token_ids: IntArray, valid: BoolArray, late: BoolArray | None = None
    ) -> None:
        """Record the results of a step: context lengths grow by the computed tokens, sampled tokens become known.

        token_ids and valid: [Q], for scheduled.rows. A slot that is not valid in its first row has failed and stops; a
        row after a draft is valid if its token is accepted. A slot that reports candidates gets no token, and waits for
        its next one in a plan. A fork of a stopped slot stops too.

        late: [Q], rows that are not valid, of slots that have not failed: their last tokens count as not computed, so
        that they are ready again. None: there are none.
        """
        self.num_computed_tokens[scheduled.slots] += scheduled.num_tokens
        if len(scheduled.idle_slots):
            self.stopped[scheduled.idle_slots] = True
        slots, rows = scheduled.sampling_slots, scheduled.rows
        if scheduled.num_drafts is not None:
            self.num_computed_tokens[scheduled.slots] -= scheduled.num_drafts
        if scheduled.sources is not None:
            # A fork shares all computed tokens of its source.
            self.num_computed_tokens[slots] = self.num_tokens[slots]
        taken, failed = scheduled.takes_token(valid), ~valid
        if late is not None and late.any():
            failed &= ~late
            self.num_computed_tokens[rows.slots[late]] = self.num_tokens[rows.slots[late]] - 1
        if rows.ahead is None:
            self._commit_tokens(slots, token_ids, taken, failed)
            return
        for index in range(int(rows.ahead.max()) + 1):
            these = np.flatnonzero(rows.ahead == index)
            if index:
                these = these[taken[these]]
                self.num_computed_tokens[rows.slots[these]] += 1
            self._commit_tokens(rows.slots[these], token_ids[these], taken[these], failed[these])

    def _commit_tokens(self, slots: IntArray, token_ids: IntArray, taken: BoolArray, failed: BoolArray) -> None:
        """Add one token [n] to each of n slots, no slot twice, where it is taken; slots that failed stop."""
        if not taken.all():
            self._stop(slots[failed])
            slots, token_ids = slots[taken], token_ids[taken]
        places = self.num_tokens[slots]
        self.num_tokens[slots] = places + 1
        self._write_tokens(slots, places, token_ids)
        ends = self.ends(slots, token_ids, places)
        if ends.any():
            self._stop(slots[ends])

    def _stop(self, slots: IntArray) -> None:
        """Let slots compute nothing more; none: other slots may be ready than before."""
        self.stopped[slots] = True
        self._decoding = None

    def _write_tokens(self, slots: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """Write a token [n] of each of n slots at its place in the sequence, no slot twice."""
        self.token_ids[slots, places] = token_ids
        self.sampling.add_tokens(slots, token_ids)
        self.writes.add(slots, places, token_ids)

    def ends(self, slots: IntArray, token_ids: IntArray, places: IntArray) -> BoolArray:
        """Return [n]: whether a token at this place of its sequence ends it: a stop token, or at max_len; [n] each."""
        stop = self.sampling.are_stop_ids(slots, token_ids)
        if stop.any():
            stop &= places + 1 - self.num_prompt_tokens[slots] >= self.sampling["min_tokens"][slots]
        if not self.limits.max_drafts:
            return stop
        drafts = self.max_drafts[slots] > 0
        return stop | (drafts & (places + 1 >= self.max_len[slots])) if drafts.any() else stop
