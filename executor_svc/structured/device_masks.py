"""Grammars of slots whose tokens a device samples: masks go there as the slots' allowed tokens, before it samples.

The host has to know a sequence's last token to make its mask. So a step with grammars is launched ahead, but samples
when all earlier ones are settled: the masks are made while the device runs the model, and a row without one is marked
as late on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import SlotError
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import LATE, SampledTokens
from executor_svc.plan.arrays import BoolArray, IntArray, ints
from executor_svc.sampling.masks import RowMasks, Words, num_mask_words
from executor_svc.structured.slot_grammars import IsLate, SlotGrammars

Send = Callable[[NDArray[Any]], Tensor]
"""Enqueues the copy of an array to the device."""


class ModelClock(Protocol):
    """The model's run in a step."""

    def is_running(self) -> bool:
        """Whether the device still runs it."""
        ...

    def elapsed_ns(self) -> int:
        """Nanoseconds that it took, or has taken so far."""
        ...


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of a step's R sampling slots, none of which has drafts if it has a grammar."""

    rows: RowMasks
    slots: IntArray
    """[R]."""
    candidates: IntArray
    """Rows that report candidates."""

    @property
    def any_errors(self) -> bool:
        """Whether `DeviceMasks.mark` has anything to do."""
        return bool(self.rows.late.any() or self.rows.failed.any())

    def of_host_rows(self, rows: IntArray) -> RowMasks:
        """Return the masks of the rows, ascending, whose tokens the host chooses."""
        return self.rows.take(rows)

    def errors(self, errors: IntArray, owners: IntArray) -> IntArray:
        """Return [Q] the errors that the device reports, with those that only the host can tell apart.

        owners: [Q], the sampling slot of each row of the device.
        """
        masked = self.rows.is_masked
        masked[self.candidates] = False
        without = (errors == int(SlotError.NO_ALLOWED_TOKEN)) & masked[owners]
        return np.where(without, int(SlotError.GRAMMAR), errors)


class DeviceMasks:
    """Sends masks to a device; for use by the device thread, like the grammars. It costs nothing without any."""

    def __init__(
        self, grammars: SlotGrammars | None, num_slots: int, allowed_bits: Tensor, num_computed: Tensor, send: Send
    ) -> None:
        """allowed_bits: [num_slots, words] int32, read for slots with a grammar; num_computed: [num_slots] int32."""
        self._grammars = grammars
        self._none: BoolArray = np.zeros(num_slots, np.bool_)
        self._all = np.arange(num_slots)
        self._allowed_bits, self._num_computed, self._send = allowed_bits, num_computed, send
        self._staged: Tensor | None = None
        self._own: dict[int, Words] = {}
        """By slot: its own allowed tokens, where it has a list of them."""

    @property
    def in_use(self) -> bool:
        """Whether any slot may have a grammar."""
        return self._grammars is not None

    @property
    def has(self) -> BoolArray:
        """[num_slots]: whether each slot has a grammar."""
        return self._none if self._grammars is None else self._grammars.have(self._all)

    @property
    def recorded(self) -> IsLate | None:
        """As in `SlotGrammars`."""
        return None if self._grammars is None else self._grammars.recorded

    def reads_tokens(self, plan: StepPlan) -> bool:
        """Whether `follow` needs the tokens of earlier steps: a grammar begins, which none of theirs may reach."""
        if self._grammars is None:
            return False
        return any(each.grammar is not None or each.source is not None for each in plan.admitted)

    def clear(self) -> None:
        """Forget all sequences."""
        if self._grammars is not None:
            self._grammars.clear()

    def follow(self, plan: StepPlan, slots: Slots, vocab: int) -> None:
        """Take over the changes of a plan that the slots have applied.

        All earlier steps are sampled, and settled if it `reads_tokens`.
        """
        if self._grammars is None:
            return
        self._grammars.follow(plan, slots)
        for sequence in plan.admitted:
            self._own.pop(sequence.slot, None)
            if self.has[sequence.slot] and len(allowed := sequence.sampling.allowed_token_ids):
                bits = np.zeros(num_mask_words(vocab) * 32, np.bool_)
                bits[ints(allowed)] = True
                self._own[sequence.slot] = np.packbits(bits, bitorder="little").view(np.uint32)

    def are_there(self, scheduled: Scheduled) -> bool:
        """Whether the step's masks are made, so that `send` would not wait."""
        return self._grammars is None or self._grammars.are_ready(scheduled.sampling_slots)

    def send(self, scheduled: Scheduled, model: ModelClock, is_late: IsLate | None) -> StepMasks | None:
        """Enqueue the step's masks, as far as they are there once the device has run the model; None if it has none.

        scheduled: without drafts. model: of this step. is_late: which rows are late, for a replay.
        """
        if self._grammars is None or not self._grammars.have(scheduled.sampling_slots).any():
            return None
        plain = replace(scheduled, num_drafts=None, drafted=None)
        if is_late is None:
            self._grammars.wait_while(plain, model.is_running)
        staged = self._staged_bits()
        masks = self._grammars.masks(plain, model.elapsed_ns(), is_late, staged.numpy().view(np.uint32))
        if masks is None:
            return None
        (rows,) = (self._grammars.have(scheduled.sampling_slots) & ~masks.late & ~masks.failed).nonzero()
        if len(rows):
            slots = scheduled.sampling_slots[rows]
            masks = self._complete(masks, rows, slots, staged[: len(rows)].numpy().view(np.uint32))
            there = staged[: len(rows)].to(self._allowed_bits.device, non_blocking=True)
            self._allowed_bits.index_copy_(0, self._send(slots), there)
        return StepMasks(masks, scheduled.sampling_slots, scheduled.candidates)

    def _staged_bits(self) -> Tensor:
        """Return [num_slots, words] int32, pinned: free again when all earlier steps are settled."""
        if self._staged is None:
            self._staged = torch.empty(
                self._allowed_bits.shape, dtype=torch.int32, pin_memory=self._allowed_bits.device.type == "cuda"
            )
        return self._staged

    def _complete(self, masks: RowMasks, rows: IntArray, slots: IntArray, bits: Words) -> RowMasks:
        """Let bits [n, words], which begin with the masks' own, hold what rows [n] of these slots may choose.

        Returns the masks, which stay as they are: the host samples some rows itself.
        """
        lists = [self._own.get(slot) for slot in slots.tolist()] if self._own else []
        if len(masks.rows) == len(rows) and not any(own is not None for own in lists):
            return masks
        masks = replace(masks, bits=masks.bits.copy())
        # Where the constraint has not begun there is no mask, and all tokens are allowed.
        bits[:] = 2**32 - 1
        bits[np.searchsorted(rows, masks.rows)] = masks.bits
        for row, own in zip(bits, lists, strict=bool(lists)):
            if own is not None:
                row &= own
        return masks

    def mark(self, masks: StepMasks, errors: Tensor) -> None:
        """Enqueue the errors of late rows and of rows whose grammar has failed, before the step commits.

        errors: [R or more] int32, of the rows.
        """
        for rows, error in ((masks.rows.late, LATE), (masks.rows.failed & ~masks.rows.late, int(SlotError.GRAMMAR))):
            if rows.any():
                errors.index_fill_(0, self._send(np.flatnonzero(rows)), error)

    def take_back(self, masks: StepMasks) -> None:
        """Enqueue that late slots compute their last tokens again, after the commit of the step."""
        if masks.rows.late.any():
            slots = self._send(masks.slots[masks.rows.late])
            self._num_computed.index_add_(0, slots, slots.new_full(slots.shape, -1).to(self._num_computed.dtype))

    def committed(self, slots: Slots, scheduled: Scheduled, sampled: SampledTokens) -> None:
        """Let threads take the tokens of a step that is settled."""
        if self._grammars is not None:
            self._grammars.committed(slots, scheduled, sampled)
