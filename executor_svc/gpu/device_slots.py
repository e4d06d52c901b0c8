"""Batch slots on the device: one copy sends a plan's changes, and sampled tokens stay on the device between steps.

The host keeps a `Slots` mirror, which validates and schedules plans. The mirror may be a step behind: a slot that has
stopped on the device, but not yet in the mirror, computes nothing and is reported as idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.batch.scheduled import Scheduled
from executor_svc.gpu.kernels.slots.commit import IDLE, commit_step
from executor_svc.gpu.kernels.slots.slot_updates import RUN_WORDS, apply_updates
from executor_svc.gpu.kernels.slots.slots import SlotState, StepBuffers, StepInputs, StepSizes
from executor_svc.gpu.kernels.slots.step_inputs import build_step
from executor_svc.gpu.slot_changes import Applied, ChangeLog
from executor_svc.gpu.staging import Changes, Download, Fetched, Upload, Words
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import Limits, StepPlan

STAGING_WORDS = 1 << 20
"""Default size of a staging buffer; larger changes of a plan need several copies."""


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """The sampled tokens of a step's R rows, those of Scheduled.sampling_slots."""

    token_ids: IntArray
    """[R]; -1: no token."""
    errors: IntArray
    """[R]: 0, SlotError, or IDLE for a slot that had stopped before the step, or whose source had."""
    positions: IntArray
    """[R]: positions of the sampled tokens; 0 for idle slots."""

    @property
    def idle(self) -> NDArray[np.bool_]:
        """[R]: whether the row is idle: without token and error."""
        result: NDArray[np.bool_] = self.errors == IDLE
        return result

    def of_rows(self, kept: BoolArray) -> CommittedTokens:
        """Return the tokens of some rows; kept: [R]."""
        return CommittedTokens(self.token_ids[kept], self.errors[kept], self.positions[kept])


class PendingTokens:
    """Sampled tokens that are being copied to the host."""

    def __init__(self, fetched: Fetched, padded_rows: int, num_rows: int) -> None:
        self._fetched, self._padded_rows, self._num_rows = fetched, padded_rows, num_rows

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._fetched.is_done()

    def wait(self) -> CommittedTokens:
        """Wait for the step. Raises any error of the device."""
        columns = self._fetched.wait().reshape(3, self._padded_rows)[:, : self._num_rows].astype(np.int64)
        return CommittedTokens(*columns)


class DeviceSlots:
    """State of all slots on a device. Calls enqueue work on the current stream; only `PendingTokens.wait` waits."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        most: StepSizes | None = None,
        staging_words: int = STAGING_WORDS,
        extra_words: int = 0,
    ) -> None:
        """Allocate slots for steps of at most `most` padded sizes, by default the limits.

        extra_words: words of `extra`, for other state by slot, written with `write`. Raises ValueError for a staging
        buffer that is too small, and for too many slots.
        """
        if most is None:
            most = StepSizes(
                limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_num_seqs, limits.max_num_seqs
            )
        self.limits = limits
        list_words = ChangeLog.list_words(limits.num_slots)
        self.state = SlotState.empty(
            limits.num_slots,
            limits.vocab_size,
            limits.max_model_len,
            limits.max_blocks_per_seq,
            device,
            list_words + extra_words,
        )
        admitted, self.extra = self.state.extra.split((list_words, extra_words))
        """extra: [extra_words] int32, zero at first."""
        self.buffers = StepBuffers.empty(most, limits.max_blocks_per_seq, device)
        least = most.num_words + RUN_WORDS
        if staging_words < least:
            raise ValueError(f"staging_words must be at least {least} for such steps, is {staging_words}")
        self._upload = Upload(staging_words, device)
        self._download = Download(3 * most.num_rows, device)
        self._changes = Changes()
        self._log = ChangeLog(self.state, admitted)
        self._staged: tuple[IntArray, StepSizes] | None = None

    def inputs(self, sizes: StepSizes) -> StepInputs:
        """Return views of the step tensors for these sizes: the same memory each time."""
        return self.buffers.inputs(sizes)

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

    def flush(self) -> None:
        """Send the collected changes, for a plan that computes nothing."""
        self._send(None, None)

    # ------------------------------------------------------------ a step

    def build(self, scheduled: Scheduled, sizes: StepSizes) -> StepInputs:
        """Send the collected changes and the scheduled work, and enqueue the building of the step's tensors.

        Raises ValueError if the step does not fit the sizes.
        """
        self.launch_build(sizes, self.stage(scheduled, sizes))
        return self.inputs(sizes)

    def stage(self, scheduled: Scheduled, sizes: StepSizes) -> bool:
        """Send the collected changes and the scheduled work: the part of `build` that no CUDA graph can hold.

        Sends nothing for decodes of the slots of the last step. Returns whether every sequence, padding too, has one
        token. Raises ValueError if the step does not fit the sizes.
        """
        decodes = _is_decode(scheduled)
        if decodes and self._is_staged(scheduled.slots, sizes):
            return True
        _check_fits(scheduled, sizes)
        if len(scheduled.idle_slots):
            # Idle forks stop now, and this plan may have admitted them: two launches. Other idle slots had stopped
            # before.
            self.flush()
            stopped = int(self.state.stopped.storage_offset()) + scheduled.idle_slots
            self._changes.write_singles(stopped, np.ones_like(scheduled.idle_slots))
        self._send(scheduled, sizes)
        self._staged = (scheduled.slots, sizes) if decodes and sizes.num_tokens == sizes.num_seqs else None
        return sizes.num_tokens == sizes.num_seqs and bool((scheduled.num_tokens == 1).all())

    def launch_build(self, sizes: StepSizes, one_each: bool) -> None:
        """Enqueue the building of the tensors of the last staged step; sizes and one_each must be of that step."""
        build_step(self._upload.on_device, self.state, self.buffers, sizes, self.limits.block_size, one_each)

    def commit(self, scheduled: Scheduled, sizes: StepSizes, tokens: Tensor, errors: Tensor) -> PendingTokens:
        """Enqueue the commit of sampled tokens to the slots, and the copy of the results to the host.

        Args:
            scheduled, sizes: of the step built last.
            tokens: [R] int64 or int32, padded, on the device.
            errors: [R] int32, 0 or SlotError.
        """
        self.launch_commit(sizes, tokens, errors)
        return self.fetch(scheduled, sizes)

    def launch_commit(self, sizes: StepSizes, tokens: Tensor, errors: Tensor) -> None:
        """Enqueue the commit of sampled tokens to the slots."""
        commit_step(tokens, errors, self.state, self.buffers, sizes)

    def fetch(self, scheduled: Scheduled, sizes: StepSizes) -> PendingTokens:
        """Enqueue the copy of the last commit's results to the host, which no CUDA graph can hold."""
        fetched = self._download.fetch(self.buffers.results[: 3 * sizes.num_rows])
        return PendingTokens(fetched, sizes.num_rows, len(scheduled.sampling_slots))

    def _is_staged(self, slots: IntArray, sizes: StepSizes) -> bool:
        """Return whether the last staged step is a decode of these slots, with no change since."""
        if self._changes or self._staged is None:
            return False
        staged, staged_sizes = self._staged
        return staged_sizes == sizes and np.array_equal(staged, slots)

    def _send(self, scheduled: Scheduled | None, sizes: StepSizes | None) -> None:
        """Send the changes in as many pieces as necessary, with the step's words at the beginning of the last one."""
        changes, self._changes = self._changes, Changes()
        step_words = 0 if sizes is None else sizes.num_words
        pieces = list(changes.split(self._upload.num_words - step_words))
        for piece in pieces[:-1]:
            self._send_piece(piece, self._upload.take(), 0)
        if pieces or step_words:
            self._staged = None
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


def _is_decode(scheduled: Scheduled) -> bool:
    """Return whether each sequence computes one token and samples one from it, without any other work."""
    num_rows = len(scheduled.sampling_slots)
    others = len(scheduled.candidates) or len(scheduled.idle_slots) or scheduled.sources is not None
    return not others and len(scheduled.slots) == num_rows == int(scheduled.num_tokens.sum())


def _check_fits(scheduled: Scheduled, sizes: StepSizes) -> None:
    num_tokens, num_logits = int(scheduled.num_tokens.sum()), int(np.count_nonzero(scheduled.samples))
    needed = StepSizes(num_tokens, len(scheduled.slots), num_logits, len(scheduled.sampling_slots))
    if not needed.within(sizes):
        raise ValueError(f"sizes: the step needs {needed}, is padded to {sizes}")


def _write_step(buffer: Words, scheduled: Scheduled, sizes: StepSizes) -> None:
    """Write the words of a step to the beginning of the buffer, as `step_inputs.build_step` reads them."""
    seqs, rows = sizes.num_seqs, sizes.num_rows
    first_row = 2 * seqs + 1 + sizes.num_logits
    slots, starts = buffer[:seqs], buffer[seqs : 2 * seqs + 1]
    logits_rows, by_row = buffer[2 * seqs + 1 : first_row], buffer[first_row : sizes.num_words]
    num_seqs, num_rows = len(scheduled.slots), len(scheduled.sampling_slots)
    slots[:num_seqs], slots[num_seqs:] = scheduled.slots, -1
    starts[0] = 0
    scheduled.num_tokens.cumsum(out=starts[1 : num_seqs + 1], dtype=np.int32)
    if num_seqs < seqs:
        # One padded token for each padded sequence, so that attention writes its row too.
        padding = np.arange(1, seqs - num_seqs + 1) + starts[num_seqs]
        starts[num_seqs + 1 :] = np.minimum(padding, sizes.num_tokens)
    ends = starts[1 : num_seqs + 1][scheduled.samples]
    logits_rows[: len(ends)], logits_rows[len(ends) :] = ends - 1, 0
    row_slots, source_slots, sources, waits = by_row.reshape(4, rows)
    by_row[: 2 * rows], by_row[2 * rows :] = -1, 0
    row_slots[:num_rows] = scheduled.sampling_slots
    if scheduled.sources is None:
        source_slots[:num_rows], sources[:num_rows] = scheduled.sampling_slots, np.arange(num_rows)
    else:
        source_slots[:num_rows] = scheduled.slots[scheduled.samples][scheduled.sources]
        sources[:num_rows] = scheduled.sources
    waits[scheduled.candidates] = 1
