"""Batch slots on the device: one copy sends a plan's changes, and sampled tokens stay on the device between steps.

The host keeps a `Slots` mirror, which validates and schedules plans. The mirror may be a step behind: a slot that has
stopped on the device, but not yet in the mirror, computes nothing and is reported as idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_states import StepStates
from executor_svc.gpu.kernels.slots.commit import IDLE, commit_step
from executor_svc.gpu.kernels.slots.draft_layout import lay_out_drafts
from executor_svc.gpu.kernels.slots.draft_passes import first_pass, next_pass
from executor_svc.gpu.kernels.slots.ngram_drafts import draft_ngrams
from executor_svc.gpu.kernels.slots.slot_updates import RUN_WORDS, apply_updates
from executor_svc.gpu.kernels.slots.slots import SlotState, StepBuffers, StepInputs, StepSizes
from executor_svc.gpu.kernels.slots.step_inputs import build_step
from executor_svc.gpu.slots.slot_changes import Applied, ChangeLog
from executor_svc.gpu.slots.slot_states import DeviceStates
from executor_svc.gpu.slots.staging import Download, Fetched, StagedChanges, Upload, Words
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.limits import Limits

STAGING_WORDS = 1 << 20
"""Default size of a staging buffer; larger changes of a plan need several copies."""
_KEPT_SIZES = 256
"""Sizes whose views are kept: to make them takes 50 us."""


@dataclass(frozen=True, slots=True)
class NgramLengths:
    """The lengths of matches from which the device makes drafts, in tokens."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """The sampled tokens of a step's Q rows: for each of Scheduled.sampling_slots one, and one after each draft."""

    token_ids: IntArray
    """[Q]; -1: no token."""
    errors: IntArray
    """[Q]: 0, SlotError, or -1: for a slot's first row IDLE, as it or its source had stopped before the step; for a row
    behind a draft NOT_ACCEPTED."""
    positions: IntArray
    """[Q]: positions of the sampled tokens; 0 for rows with error -1."""
    ahead: IntArray
    """[Q]: number of the slot's drafts before each row."""
    is_plain: bool = False
    """Whether it is known that each row has a token, and none is behind a draft."""

    @property
    def idle(self) -> BoolArray:
        """[Q]: whether the row is idle: without token and error."""
        result: BoolArray = (self.errors == IDLE) & (self.ahead == 0)
        return result

    @property
    def owners(self) -> IntArray:
        """[Q]: index of the row's slot among the sampling slots."""
        result: IntArray = (self.ahead == 0).cumsum() - 1
        return result

    @property
    def num_drafts(self) -> IntArray:
        """[R]: drafts of each sampling slot."""
        result: IntArray = np.diff(np.flatnonzero(self.ahead == 0), append=len(self.ahead)) - 1
        return result

    def of_rows(self, kept: BoolArray) -> CommittedTokens:
        """Return the tokens of some rows; kept: [Q], the same for all rows of a slot."""
        return CommittedTokens(self.token_ids[kept], self.errors[kept], self.positions[kept], self.ahead[kept])

    def with_drafts(self, scheduled: Scheduled) -> Scheduled:
        """Return the scheduled work with the drafts that the step has checked."""
        if self.is_plain or not self.ahead.any():
            return scheduled
        num_drafts = np.zeros(len(scheduled.slots), np.int64)
        num_drafts[scheduled.samples] = self.num_drafts
        return scheduled.with_drafts(num_drafts)


class PendingTokens:
    """Sampled tokens that are being copied to the host."""

    def __init__(self, fetched: Fetched, sizes: StepSizes, num_rows: int) -> None:
        """sizes: of the step; num_rows: without padding."""
        self._fetched, self._sizes, self._num_rows = fetched, sizes, num_rows

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._fetched.is_done()

    def wait(self) -> CommittedTokens:
        """Wait for the step. Raises any error of the device."""
        words, num_rows = self._fetched.wait(), self._num_rows
        rounds, padded_rows = 1 + self._sizes.num_drafts, self._sizes.num_rows
        if rounds == 1:
            token_ids, errors, positions = words.reshape(3, padded_rows)[:, :num_rows].astype(np.int64)
            is_plain = not errors.any()
            return CommittedTokens(token_ids, errors, positions, np.zeros(num_rows, np.int64), is_plain)
        by_round, drafts = np.split(words.astype(np.int64), [3 * rounds * padded_rows])
        by_round = by_round.reshape(rounds, 3, padded_rows)[:, :, :num_rows]
        counts = 1 + drafts[: self._num_rows]
        owner, ahead = spans(np.zeros_like(counts), counts)
        token_ids, errors, positions = by_round[ahead, :, owner].T
        return CommittedTokens(token_ids, errors, positions, ahead)


@dataclass(frozen=True, slots=True)
class _Staged:
    """A decode whose words are on the device."""

    slots: IntArray
    num_drafts: IntArray | None
    sizes: StepSizes
    most_drafts: int

    def is_same(self, other: _Staged | None) -> bool:
        """Return whether another decode has the same words."""
        if other is None or (self.sizes, self.most_drafts) != (other.sizes, other.most_drafts):
            return False
        if self.slots is not other.slots and not np.array_equal(self.slots, other.slots):
            return False
        mine, others = self.num_drafts, other.num_drafts
        return mine is others or (mine is not None and others is not None and np.array_equal(mine, others))


class DeviceSlots:
    """State of all slots on a device. Calls enqueue work on the current stream; only `PendingTokens.wait` waits."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        most: StepSizes | None = None,
        staging_words: int = STAGING_WORDS,
        extra_words: int = 0,
        ngrams: NgramLengths | None = None,
    ) -> None:
        """Allocate slots for steps of at most `most` padded sizes, by default the limits.

        extra_words: words of `extra`, for other state by slot, written with `write`. ngrams: of the drafts that steps
        make; None: drafts are given, with `put_drafts`, or made in passes. Raises ValueError for a staging buffer that
        is too small, and for too many slots.
        """
        if most is None:
            seqs = limits.max_num_seqs
            most = StepSizes(limits.max_num_batched_tokens, seqs, seqs, seqs, limits.max_drafts)
        self.limits = limits
        self._ngrams = ngrams
        own_words = ChangeLog.list_words(limits.num_slots), DeviceStates.num_words(limits)
        self.state = SlotState.empty(
            limits.num_slots,
            limits.vocab_size,
            limits.max_model_len,
            limits.max_blocks_per_seq,
            device,
            sum(own_words) + extra_words,
            limits.num_tables,
        )
        admitted, states, self.extra = self.state.extra.split((*own_words, extra_words))
        """extra: [extra_words] int32, zero at first."""
        self.buffers = StepBuffers.empty(most, limits.max_blocks_per_seq, device, limits.num_tables)
        least = most.num_words + RUN_WORDS
        if staging_words < least:
            raise ValueError(f"staging_words must be at least {least} for such steps, is {staging_words}")
        self._upload = Upload(staging_words, device)
        self._download = Download(most.num_results, device)
        self._changes = StagedChanges()
        self.states = DeviceStates(limits, states)
        self._log = ChangeLog(limits, self.state, admitted, self.states.tables)
        self._staged: _Staged | None = None
        self._adapter_places = np.zeros(limits.num_slots, np.int64)
        self._inputs = lru_cache(_KEPT_SIZES)(self.buffers.inputs)
        self._results = lru_cache(_KEPT_SIZES)(lambda count: self.buffers.results[:count])

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Return views of the step tensors for these sizes: the same memory each time."""
        return self._inputs(sizes)

    # ------------------------------------------------------------ the changes of a plan

    def apply(self, plan: StepPlan) -> Applied:
        """Collect a plan's admissions, appended blocks and given tokens; the next step or `flush` sends them.

        The plan must be valid, as checked by `Slots.apply`; its arrays must not change until they have been sent.
        """
        if self._changes:
            # Two plans may write the same word, which one launch must not do.
            self.flush()
        return self._log.add_plan(plan, self._changes)

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        """Collect a write of integers that fit 32 bits to the beginning of a contiguous view of the state.

        One plan must not write a word twice. Raises ValueError for another target.
        """
        if target.untyped_storage().data_ptr() != self.state.words.data_ptr():
            raise ValueError("target is no view of the slots' state")
        if len(values) > target.numel() or not target.is_contiguous():
            raise ValueError(f"target {list(target.shape)} is not contiguous or too small for {len(values)} words")
        self._changes.write(int(target.storage_offset()), values)

    def put_drafts(self, slots: IntArray, counts: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """Collect the drafts of the next step, which are made on the host, for all slots of its sequences.

        slots, counts, places: [S], drafts of each slot, and number of its known tokens. token_ids: [counts.sum()],
        joined in the order of slots.
        """
        if self._changes:
            # The plan may have admitted these slots, without drafts: two launches.
            self.flush()
        self._changes.write_singles(int(self.state.num_drafts.storage_offset()) + slots, counts)
        owner, at = spans(places, counts)
        self._changes.write_singles(self._log.places_of_tokens(slots[owner], at), token_ids)

    def put_saves(self, states: StepStates | None) -> None:
        """Collect what the next step may save of recurrent states; None: nothing. Of a model with states, each step."""
        self.states.put_saves(states, self._changes)

    def set_adapter_places(self, places: IntArray) -> None:
        """Collect the places [num_slots] of the slots' adapters, as far as they differ from those of earlier steps."""
        changed = np.flatnonzero(places != self._adapter_places)
        self._changes.write_singles(int(self.state.adapter_places.storage_offset()) + changed, places[changed])
        self._adapter_places[changed] = places[changed]

    def flush(self) -> None:
        """Send the collected changes, for a plan that computes nothing."""
        self._send(None, None)

    # ------------------------------------------------------------ a step

    def build(self, scheduled: Scheduled, sizes: StepSizes, most_drafts: int = 0) -> StepInputs:
        """Send the collected changes and the scheduled work, and enqueue the building of the step's tensors.

        Arguments as of `stage`. Raises ValueError if the step does not fit the sizes.
        """
        self.launch_build(sizes, self.stage(scheduled, sizes, most_drafts))
        return self.inputs(sizes)

    def stage(self, scheduled: Scheduled, sizes: StepSizes, most_drafts: int = 0) -> bool:
        """Send the collected changes and the scheduled work: the part of `build` that no CUDA graph can hold.

        scheduled: with places for drafts, where slots may have some. most_drafts: of a slot, that the step makes.

        Sends nothing for decodes of the slots of the last step. Returns whether every sequence, padding too, has one
        token. Raises ValueError if the step does not fit the sizes.
        """
        staged = _Staged(scheduled.slots, scheduled.num_drafts, sizes, most_drafts) if is_decode(scheduled) else None
        if staged is not None and not self._changes and staged.is_same(self._staged):
            return sizes.num_tokens == sizes.num_seqs
        _check_fits(scheduled, sizes)
        if len(scheduled.idle_slots):
            # Idle forks stop now, and this plan may have admitted them: two launches. Other idle slots had stopped
            # before.
            self.flush()
            stopped = int(self.state.stopped.storage_offset()) + scheduled.idle_slots
            self._changes.write_singles(stopped, np.ones_like(scheduled.idle_slots))
        self._send(scheduled, sizes, most_drafts)
        self._staged = staged
        return sizes.num_tokens == sizes.num_seqs and bool((scheduled.num_tokens == 1).all())

    def launch_build(self, sizes: StepSizes, one_each: bool) -> None:
        """Enqueue the building of the tensors of the last staged step; sizes and one_each must be of that step."""
        words = self._upload.on_device
        if sizes.num_drafts:
            if self._ngrams is not None:
                draft_ngrams(words, self.state, sizes, self._ngrams.shortest, self._ngrams.longest)
            lay_out_drafts(words, self.state, self.buffers, sizes)
            words = self.buffers.words
        build_step(words, self.state, self.buffers, sizes, self.limits.block_size, one_each)

    def launch_first_pass(self, sizes: StepSizes, num_seqs: int, *, head: bool) -> None:
        """Enqueue the building of the first drafting pass over the last staged step, as `first_pass` does."""
        staged, size = self._upload.on_device, self.limits.block_size
        first_pass(staged, self.state, self.buffers, sizes, num_seqs, size, head=head)

    def launch_next_pass(self, num_seqs: int, index: int, tokens: Tensor, errors: Tensor, *, head: bool) -> None:
        """Enqueue the commit of the drafts of a pass, and the building of the next one, as `next_pass` does."""
        next_pass(tokens, errors, self.state, self.buffers, num_seqs, index, self.limits.block_size, head=head)

    def staged_slots(self, num_seqs: int) -> Tensor:
        """Return the slots [num_seqs] int32 of the last staged step's first sequences."""
        return self._upload.on_device[:num_seqs]

    def commit(self, scheduled: Scheduled, sizes: StepSizes, tokens: Tensor, errors: Tensor) -> PendingTokens:
        """Enqueue the commit of sampled tokens to the slots, and the copy of the results to the host.

        Args:
            scheduled, sizes: of the step built last.
            tokens: [R] int64 or int32, padded, on the device.
            errors: [R] int32, 0 or SlotError.
        """
        self.launch_commit(sizes, tokens, errors)
        return self.fetch(scheduled, sizes)

    def launch_commit(self, sizes: StepSizes, tokens: Tensor, errors: Tensor, round: int = 0) -> None:
        """Enqueue the commit of sampled tokens to the slots; with drafts for each round, as in `commit_step`."""
        commit_step(tokens, errors, self.state, self.buffers, sizes, round)

    def fetch(self, scheduled: Scheduled, sizes: StepSizes) -> PendingTokens:
        """Enqueue the copy of the results of the last step to the host, which no CUDA graph can hold."""
        fetched = self._download.fetch(self._results(sizes.num_results))
        return PendingTokens(fetched, sizes, len(scheduled.sampling_slots))

    def _send(self, scheduled: Scheduled | None, sizes: StepSizes | None, most_drafts: int = 0) -> None:
        """Send the changes in as many pieces as necessary, with the step's words at the beginning of the last one."""
        changes, self._changes = self._changes, StagedChanges()
        step_words = 0 if sizes is None else sizes.num_words
        pieces = list(changes.split(self._upload.num_words - step_words))
        for piece in pieces[:-1]:
            self._send_piece(piece, self._upload.take(), 0)
        if pieces or step_words:
            self._staged = None
            buffer = self._upload.take()
            if scheduled is not None and sizes is not None:
                _write_step(buffer, scheduled, sizes, most_drafts)
            self._send_piece(pieces[-1] if pieces else StagedChanges(), buffer, step_words)

    def _send_piece(self, piece: StagedChanges, buffer: Words, first: int) -> None:
        if not piece:
            self._upload.send(first)
            return
        counts = piece.pack(buffer, first)
        self._upload.send(piece.packed_end(counts))
        apply_updates(self._upload.on_device, counts, self.state)


def is_decode(scheduled: Scheduled) -> bool:
    """Return whether each sequence computes one token, drafts aside, and samples, and there is no other work."""
    if scheduled.is_one_each and not len(scheduled.candidates):
        return True
    num_rows = len(scheduled.sampling_slots)
    others = len(scheduled.candidates) or len(scheduled.idle_slots) or scheduled.has_forks
    num_tokens = int(scheduled.num_tokens.sum())
    if scheduled.num_drafts is not None:
        num_tokens -= int(scheduled.num_drafts.sum())
    return not others and len(scheduled.slots) == num_rows == num_tokens


def _check_fits(scheduled: Scheduled, sizes: StepSizes) -> None:
    num_tokens, num_logits = int(scheduled.num_tokens.sum()), len(scheduled.logits_slots)
    num_drafts = 0 if scheduled.num_drafts is None else int(scheduled.num_drafts.max())
    needed = StepSizes(num_tokens, len(scheduled.slots), num_logits, len(scheduled.sampling_slots), num_drafts)
    if not needed.within(sizes):
        raise ValueError(f"sizes: the step needs {needed}, is padded to {sizes}")


def _write_step(buffer: Words, scheduled: Scheduled, sizes: StepSizes, most_drafts: int) -> None:
    """Write the words of a step to the beginning of the buffer, as `step_inputs.build_step` reads them."""
    seqs, rows = sizes.num_seqs, sizes.num_rows
    first_row = 2 * seqs + 1 + sizes.num_logits
    end = first_row + 4 * rows
    slots, starts = buffer[:seqs], buffer[seqs : 2 * seqs + 1]
    logits_rows, by_row = buffer[2 * seqs + 1 : first_row], buffer[first_row:end]
    num_seqs, num_rows = len(scheduled.slots), len(scheduled.sampling_slots)
    slots[:num_seqs], slots[num_seqs:] = scheduled.slots, -1
    starts[0] = 0
    scheduled.num_tokens.cumsum(out=starts[1 : num_seqs + 1], dtype=np.int32)
    if num_seqs < seqs:
        # One padded token for each padded sequence, so that attention writes its row too.
        padding = np.arange(1, seqs - num_seqs + 1) + starts[num_seqs]
        starts[num_seqs + 1 :] = np.minimum(padding, sizes.num_tokens)
    needed = scheduled.logits_rows
    logits_rows[: len(needed)], logits_rows[len(needed) :] = needed, 0
    row_slots, source_slots, sources, waits = by_row.reshape(4, rows)
    by_row[: 2 * rows], by_row[2 * rows :] = -1, 0
    row_slots[:num_rows] = scheduled.sampling_slots
    if scheduled.sources is None:
        source_slots[:num_rows], sources[:num_rows] = scheduled.sampling_slots, np.arange(num_rows)
    else:
        source_slots[:num_rows] = scheduled.logits_slots[scheduled.sources]
        sources[:num_rows] = scheduled.sources
    waits[scheduled.candidates] = 1
    buffer[end : sizes.num_words] = most_drafts
