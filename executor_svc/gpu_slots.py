"""Batch slots on the device: a plan's changes are sent in one copy, and sampled tokens never visit the host in between.

The host keeps a `Slots` beside it, which says whether a plan is valid and what it schedules. It may be a step behind: a
slot that the device knows to have stopped, and the host does not, computes nothing and is told to be idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.gpu_staging import Changes, Download, Fetched, Upload, Words
from executor_svc.kernels.gpu.commit import IDLE, commit_step
from executor_svc.kernels.gpu.slot_updates import RUN_WORDS, apply_updates
from executor_svc.kernels.gpu.slots import NUM_NUMBERS, SlotState, StepBuffers, StepInputs, StepSizes, padded
from executor_svc.kernels.gpu.step_inputs import build_step
from executor_svc.plan import AdmittedSequence, IntArray, Limits, SlotColumns, StepPlan
from executor_svc.slots import Scheduled

STAGING_WORDS = 1 << 20
"""Of a staging buffer, unless told otherwise: a plan that changes more goes in several copies."""

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Applied:
    """What a plan changed, for those who keep more by slot; on the device after `build` or `flush`, until the next."""

    slots: Tensor
    """[A] int32: slots admitted."""
    max_tokens: int
    """None of them has more known tokens; 0 if there are none."""
    given_slots: Tensor
    """[G] int32: slots that got a token."""
    given_tokens: Tensor
    """[G] int64: the token of each."""


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """What a step sampled, by row: R rows, those of Scheduled.sampling_slots."""

    token_ids: IntArray
    """[R]; -1: none was taken."""
    errors: IntArray
    """[R]: 0, SlotError, or IDLE of a slot that had stopped before the step, or whose source had."""
    positions: IntArray
    """[R]: of what was chosen; 0 where idle."""

    @property
    def idle(self) -> NDArray[np.bool_]:
        """[R]: reports no token and no error."""
        result: NDArray[np.bool_] = self.errors == IDLE
        return result


class PendingTokens:
    """Sampled tokens on their way to the host."""

    def __init__(self, fetched: Fetched, padded_rows: int, num_rows: int) -> None:
        self._fetched, self._padded_rows, self._num_rows = fetched, padded_rows, num_rows

    def is_done(self) -> bool:
        """Would `wait` return at once."""
        return self._fetched.is_done()

    def wait(self) -> CommittedTokens:
        """Wait for the step to be done. Raises what the device raises."""
        columns = self._fetched.wait().reshape(3, self._padded_rows)[:, : self._num_rows].astype(np.int64)
        return CommittedTokens(*columns)


class DeviceSlots:
    """State of all slots on a device. All work is enqueued on the current stream; only `PendingTokens.wait` waits."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        most: StepSizes | None = None,
        staging_words: int = STAGING_WORDS,
        extra_words: int = 0,
    ) -> None:
        """Make slots for steps of at most these padded sizes, by default the limits.

        extra_words: room for what others keep by slot, in `extra`, to be sent by `write`. Raises ValueError for a
        staging buffer that is too small, and for slots that are too many.
        """
        if most is None:
            most = StepSizes(
                limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_num_seqs, limits.max_num_seqs
            )
        self.limits = limits
        self._listed = padded(limits.num_slots)
        self.state = SlotState.empty(
            limits.num_slots,
            limits.vocab_size,
            limits.max_model_len,
            limits.max_blocks_per_seq,
            device,
            4 * self._listed + extra_words,
        )
        self.buffers = StepBuffers.empty(most, limits.max_blocks_per_seq, device)
        least = most.num_words + RUN_WORDS
        if staging_words < least:
            raise ValueError(f"staging_words must be at least {least} for such steps, is {staging_words}")
        self._upload = Upload(staging_words, device)
        self._download = Download(3 * most.num_rows, device)
        self._changes = Changes()
        # Kept by the host too: appended blocks go behind these, and bits of earlier stop ids must be cleared.
        self._num_blocks = np.zeros(limits.num_slots, np.int64)
        self._stop_words = [np.zeros(0, np.int64)] * limits.num_slots

    @property
    def extra(self) -> Tensor:
        """[extra_words] int32, zero at first."""
        return self.state.extra[4 * self._listed :]

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Views of the tensors of steps of these sizes: the same memory each time."""
        return self.buffers.inputs(sizes)

    # ------------------------------------------------------------ what a plan changes

    def apply(self, plan: StepPlan) -> Applied:
        """Note a plan's admissions, appended blocks and given tokens, to be sent with the next step or `flush`.

        The plan must be valid, as `Slots.apply` finds; its arrays must stay as they are until they have been sent.
        """
        if self._changes:
            # What one plan wrote, the next may write again: never both in one launch.
            self.flush()
        if plan.admitted:
            self._admit(plan.admitted)
        self._append_blocks(plan.appends)
        given = plan.given
        self._changes.give(given.slots, given.values)
        lists = self.state.extra
        slots, given_slots, given_tokens = lists[: 4 * self._listed].split(
            (self._listed, self._listed, 2 * self._listed)
        )
        self.write(given_slots, given.slots)
        self.write(given_tokens, given.values.astype("<i8").view("<i4"))
        self.write(slots, np.array([sequence.slot for sequence in plan.admitted], np.int64))
        return Applied(
            slots[: len(plan.admitted)],
            max((len(sequence.token_ids) for sequence in plan.admitted), default=0),
            given_slots[: len(given.slots)],
            given_tokens.view(torch.int64)[: len(given.slots)],
        )

    def write(self, target: Tensor, values: NDArray[Any]) -> None:
        """Have integers that fit 32 bits written to the beginning of a contiguous view of the state, as above.

        No word may be written twice for one plan.
        """
        if target.untyped_storage().data_ptr() != self.state.words.data_ptr():
            raise ValueError("target is no view of the slots' state")
        if len(values) > target.numel() or not target.is_contiguous():
            raise ValueError(f"target {list(target.shape)} is not contiguous or has no room for {len(values)} words")
        self._changes.write(_place(target), values)

    def flush(self) -> None:
        """Send what has been noted, for a plan that computes nothing."""
        self._send(None, None)

    def _admit(self, sequences: tuple[AdmittedSequence, ...]) -> None:
        state = self.state
        slots = np.array([sequence.slot for sequence in sequences], np.int64)
        # In the order of the rows of `numbers`: the last two flags are down.
        numbers = np.array(
            [
                (
                    len(sequence.token_ids),
                    sequence.num_prompt_tokens,
                    sequence.num_computed_tokens,
                    0,
                    0,
                    min(sequence.sampling.min_tokens, _MAX_INT32),
                )
                for sequence in sequences
            ],
            np.int64,
        )
        rows = _place(state.numbers) + np.arange(NUM_NUMBERS) * state.numbers.stride(0)
        self._changes.write_singles((rows + slots[:, None]).ravel(), numbers.ravel())
        for sequence in sequences:
            slot = sequence.slot
            self.write(state.token_ids[slot], sequence.token_ids)
            self.write(state.block_tables[slot], sequence.block_ids)
            self._num_blocks[slot] = len(sequence.block_ids)
            self._set_stop_ids(slot, sequence.sampling.stop_token_ids)

    def _set_stop_ids(self, slot: int, token_ids: IntArray) -> None:
        earlier = self._stop_words[slot]
        words, index = np.unique(token_ids // 32, return_inverse=True)
        bits = np.zeros(len(words), np.int64)
        np.bitwise_or.at(bits, index, 1 << token_ids % 32)
        left = np.setdiff1d(earlier, words, assume_unique=True)
        row = _place(self.state.stop_bits[slot])
        values = np.concatenate((bits, np.zeros_like(left)))
        self._changes.write_singles(row + np.concatenate((words, left)), values)
        self._stop_words[slot] = words

    def _append_blocks(self, appends: SlotColumns) -> None:
        if not len(appends.slots):
            return
        tables = self.state.block_tables
        order = np.argsort(appends.slots, kind="stable")
        slots = appends.slots[order]
        _, first, counts = np.unique(slots, return_index=True, return_counts=True)
        places = self._num_blocks[slots] + np.arange(len(slots)) - np.repeat(first, counts)
        self._changes.write_singles(_place(tables) + slots * tables.stride(0) + places, appends.values[order])
        self._num_blocks[slots[first]] += counts

    # ------------------------------------------------------------ a step

    def build(self, scheduled: Scheduled, sizes: StepSizes) -> StepInputs:
        """Send what has been noted and what is scheduled, and enqueue the making of the step's tensors.

        Raises ValueError if the step does not fit the sizes.
        """
        self.launch_build(sizes, self.stage(scheduled, sizes))
        return self.inputs(sizes)

    def stage(self, scheduled: Scheduled, sizes: StepSizes) -> bool:
        """Send what has been noted and what is scheduled: the part of `build` that no CUDA graph can hold.

        Returns whether every sequence, padding too, has one token. Raises ValueError if the step does not fit.
        """
        _check_fits(scheduled, sizes)
        if len(scheduled.idle_slots):
            # Forks among them stop now; the others have stopped before.
            stopped = _place(self.state.stopped) + scheduled.idle_slots
            self._changes.write_singles(stopped, np.ones_like(scheduled.idle_slots))
        self._send(scheduled, sizes)
        return sizes.num_tokens == sizes.num_seqs and bool((scheduled.num_tokens == 1).all())

    def launch_build(self, sizes: StepSizes, one_each: bool) -> None:
        """Enqueue the making of tensors of what was staged last; the sizes and one_each must be of that step."""
        build_step(self._upload.on_device, self.state, self.buffers, sizes, self.limits.block_size, one_each)

    def commit(self, scheduled: Scheduled, sizes: StepSizes, tokens: Tensor, errors: Tensor) -> PendingTokens:
        """Enqueue that the slots take their sampled tokens, and the copy of what the host is told.

        Args:
            scheduled, sizes: of the step built last.
            tokens: [R] int64 or int32, padded, on the device.
            errors: [R] int32, 0 or SlotError.
        """
        self.launch_commit(sizes, tokens, errors)
        return self.fetch(scheduled, sizes)

    def launch_commit(self, sizes: StepSizes, tokens: Tensor, errors: Tensor) -> None:
        """Enqueue that the slots take their sampled tokens."""
        commit_step(tokens, errors, self.state, self.buffers, sizes)

    def fetch(self, scheduled: Scheduled, sizes: StepSizes) -> PendingTokens:
        """Enqueue the copy of what the last commit tells the host: the part of `commit` that no CUDA graph can hold."""
        fetched = self._download.fetch(self.buffers.results[: 3 * sizes.num_rows])
        return PendingTokens(fetched, sizes.num_rows, len(scheduled.sampling_slots))

    def _send(self, scheduled: Scheduled | None, sizes: StepSizes | None) -> None:
        """Send the changes in as many pieces as they need, the step's words at the beginning of the last one."""
        changes, self._changes = self._changes, Changes()
        step_words = 0 if sizes is None else sizes.num_words
        pieces = list(changes.cut(self._upload.num_words - step_words))
        for piece in pieces[:-1]:
            self._send_piece(piece, self._upload.take(), 0)
        if pieces or step_words:
            buffer = self._upload.take()
            if scheduled is not None and sizes is not None:
                _write_step(buffer, scheduled, sizes)
            self._send_piece(pieces[-1] if pieces else Changes(), buffer, step_words)

    def _send_piece(self, piece: Changes, buffer: Words, first: int) -> None:
        if not piece:
            self._upload.send(first)
            return
        counts = piece.pack(buffer, first)
        self._upload.send(piece.packed_end(counts))
        apply_updates(self._upload.on_device, counts, self.state)


def _place(view: Tensor) -> int:
    """Where a view of the state begins in it."""
    return int(view.storage_offset())


def _check_fits(scheduled: Scheduled, sizes: StepSizes) -> None:
    counts = scheduled.num_tokens
    needed = StepSizes(
        int(counts.sum()), len(counts), int(np.count_nonzero(scheduled.samples)), len(scheduled.sampling_slots)
    )
    if not needed.within(sizes):
        raise ValueError(f"sizes: the step needs {needed}, is padded to {sizes}")


def _write_step(buffer: Words, scheduled: Scheduled, sizes: StepSizes) -> None:
    """Write to the beginning of the buffer what `step_inputs.build_step` reads there."""
    seqs, logits, rows = sizes.num_seqs, sizes.num_logits, sizes.num_rows
    slots, starts, logits_rows, by_row = np.split(buffer[: sizes.num_words], np.cumsum((seqs, seqs + 1, logits)))
    num_seqs, num_rows = len(scheduled.slots), len(scheduled.sampling_slots)
    slots[:num_seqs], slots[num_seqs:] = scheduled.slots, -1
    starts[0] = 0
    scheduled.num_tokens.cumsum(out=starts[1 : num_seqs + 1], dtype=np.int32)
    # A padded token for each padded sequence, so that attention writes its row too.
    padding = np.arange(1, seqs - num_seqs + 1) + starts[num_seqs]
    starts[num_seqs + 1 :] = np.minimum(padding, sizes.num_tokens)
    ends = starts[1 : num_seqs + 1][scheduled.samples]
    logits_rows[: len(ends)], logits_rows[len(ends) :] = ends - 1, 0
    row_slots, source_slots, sources, waits = by_row.reshape(4, rows)
    row_slots[:num_rows], row_slots[num_rows:] = scheduled.sampling_slots, -1
    read = np.arange(num_rows) if scheduled.sources is None else scheduled.sources
    source_slots[:num_rows], source_slots[num_rows:] = scheduled.slots[scheduled.samples][read], -1
    sources[:num_rows], sources[num_rows:] = read, 0
    waits[:] = 0
    waits[scheduled.candidates] = 1
