"""The passes in which the device drafts before a step, beside what the sources of a CPU's executor compute.

A pass is given the host's draft as if it had been sampled: so slots hold the same drafts, and a row fails where the
host has fewer than the device may make.
"""

from __future__ import annotations

import numpy as np
import torch

from cadenza_common.plan.result import SlotError
from executor_svc.batch.forward_batch import ForwardBatch, flat_batch
from executor_svc.batch.ragged import spans
from executor_svc.gpu.checks.steps.history import CheckedStep
from executor_svc.gpu.checks.steps.words import differing, first_of, tokens_reason
from executor_svc.gpu.kernels.slots.draft_passes import FIRST_TOKENS
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.speculation.drafting import draft_room
from executor_svc.worker.head_source import head_batch

_FAILED = int(SlotError.NON_FINITE_LOGITS)


class CheckedPasses:
    """The passes of a step whose changes were sent, and which is not built yet; its padding takes part."""

    def __init__(self, step: CheckedStep, *, is_head: bool) -> None:
        """is_head: as of `drafts.passes.PassModel`. Without drafts the step has a first pass of a draft model alone."""
        self._step, self._is_head = step, is_head
        self._truth, self._rows = step.history.truth, step.actual.slots
        self._on_device, self._num_seqs = step.history.slots, step.sizes.num_seqs
        self._places = np.flatnonzero(np.isin(step.planned.slots, self._rows))
        """[S] where the step's tensors have the slots that have not stopped."""
        self._known: IntArray = self._truth.num_tokens[self._rows].copy()
        left = self._known - self._truth.num_computed_tokens[self._rows]
        self._taking: BoolArray = (left == 1) & (self._known >= FIRST_TOKENS)
        self._room, self._made = np.zeros_like(self._known), np.zeros_like(self._known)
        if step.planned.num_drafts is not None and step.actual.num_drafts is not None:
            room = draft_room(self._truth, step.plan, step.actual)
            self._room = np.minimum(room, step.planned.num_drafts[self._places])
            self._made = step.actual.num_drafts

    @property
    def numbers(self) -> range:
        """The numbers of the passes from whose logits a draft is sampled."""
        return range(1, 1 + min(self._step.plan.max_drafts, self._step.sizes.num_drafts))

    def first(self) -> str | None:
        """Build the first pass; return how its tensors and the slots are wrong."""
        self._on_device.launch_first_pass(self._step.sizes, self._num_seqs, head=self._is_head)
        drafting = self._room > 0
        reasons = [self._drafts_reason(self._room, 0), self._rows_reason(drafting), self._tables_reason()]
        if self._is_head:
            wanted = self._by_sequence(drafting, self._rows, -1)
            reasons.append(differing("logits_rows", self._inputs(1).logits_rows, wanted))
        else:
            rows, context = self._rows[self._taking], self._known[self._taking] - FIRST_TOKENS
            each = np.full_like(rows, FIRST_TOKENS)
            batch = flat_batch(self._truth, rows, context, each, each[:0]) if len(rows) else None
            reasons.append(self._tensors_reason(self._taking, batch, FIRST_TOKENS))
        return first_of(reasons)

    def sample(self, number: int) -> None:
        """Let the rows of a pass have sampled the host's drafts; a row of which there is none has failed."""
        failing = self._made == number - 1
        at = np.minimum(self._known + number - 1, self._truth.limits.max_model_len)
        # No valid token, or an error beside a token that may not be read.
        by_error = self._rows // 2 % 2  # slots with an odd number have no room to fail
        tokens = np.where(failing, by_error - 1, self._truth.token_ids[self._rows, at])
        errors = np.where(failing & (by_error == 1), _FAILED, 0)
        found = self._step.history.sampler.rows(self._inputs(1))
        for tensor, values in zip(found, (tokens, errors), strict=True):
            tensor.copy_(torch.from_numpy(self._by_sequence(np.ones_like(failing), values, 0)))

    def count(self) -> None:
        """Count the tokens that the rows of a pass have sampled, until `recount`."""
        inputs, history = self._inputs(1), self._step.history
        history.sampling.count_guessed(inputs, history.sampler.rows(inputs)[0])

    def recount(self) -> None:
        """Count the known tokens of the step's slots, as after its passes."""
        slots = self._on_device.staged_slots(self._num_seqs)
        self._step.history.sampling.recount(slots, self._truth.limits.max_model_len)

    def next(self, number: int) -> str | None:
        """Write the drafts of a pass, and build the next one; return how its tensors and the slots are wrong."""
        sampled = self._step.history.sampler.rows(self._inputs(1))
        self._on_device.launch_next_pass(self._num_seqs, number, *sampled, head=self._is_head)
        going = (self._made >= number) & (self._room > number)
        rows, context = self._rows[going], self._known[going] + number - 1
        batch, ones = None, np.ones_like(rows)
        if len(rows) and self._is_head:
            batch = head_batch(self._truth, rows, context - 1, ones)
        elif len(rows):
            batch = flat_batch(self._truth, rows, context, ones, ones[:0])
        # One that has failed has no more than it has made.
        counts = np.where(self._made < number, self._made, self._room)
        reasons = [self._drafts_reason(counts, number), self._rows_reason(going), self._tensors_reason(going, batch, 1)]
        if number == self.numbers[-1]:
            reasons.append(self._step.history.state_reason())
        return first_of(reasons)

    def _inputs(self, each: int) -> StepInputs:
        """Return the tensors of a pass with so many tokens of each sequence."""
        n = self._num_seqs
        return self._on_device.inputs(StepSizes(n * each, n, n, n))

    def _by_sequence(self, which: BoolArray, values: IntArray, other: int) -> IntArray:
        """Return [sequences of the step] the values of those of its slots; other for all else."""
        found = np.full(self._num_seqs, other)
        found[self._places[which]] = values[which]
        return found

    def _drafts_reason(self, counts: IntArray, number: int) -> str | None:
        """Return how the slots' drafts are wrong after `number` of them; counts: those that each may have."""
        state, truth, planned = self._on_device.state, self._truth, self._step.planned.slots
        guessed = self._known + np.clip(np.minimum(self._made, self._room - 1), 0, number)
        owner, at = spans(self._known, np.minimum(self._made, number))
        slots = self._rows[owner]
        reasons = [differing("drafts", state.token_ids[slots, at], truth.token_ids[slots, at])]
        for name, values in (("num_drafts", counts), ("num_guessed", guessed)):
            wanted = self._by_sequence(np.ones_like(self._taking), values, 0)[: len(planned)]
            reasons.append(differing(name, getattr(state, name)[planned], wanted))
        return first_of(reasons)

    def _rows_reason(self, drafting: BoolArray) -> str | None:
        inputs = self._inputs(1)
        return first_of([
            differing("rows", inputs.rows, self._by_sequence(drafting, self._rows, -1)),
            differing("sources", inputs.sources, np.arange(self._num_seqs)),
        ])  # fmt: skip

    def _tables_reason(self) -> str | None:
        tables, size, reasons = self._on_device.buffers.tables.cpu(), self._truth.limits.block_size, []
        for index in np.flatnonzero(self._taking).tolist():
            blocks = -(-int(self._known[index] + self._room[index]) // size)
            wanted = self._truth.tables[self._rows[index], :, :blocks]
            reasons.append(differing("tables", tables[self._places[index], :, :blocks], wanted))
        return first_of(reasons)

    def _tensors_reason(self, taking: BoolArray, batch: ForwardBatch | None, each: int) -> str | None:
        """Return how the tensors of a pass differ; batch: of the slots that take part, with `each` tokens."""
        inputs, lens = self._inputs(each), np.zeros(self._num_seqs, np.int64)
        computed = np.zeros((self._num_seqs, each), np.bool_)
        computed[self._places[taking]] = True
        if batch is not None:
            lens[self._places[taking]] = batch.seq_lens
        starts = each * np.arange(self._num_seqs + 1)
        numbers = (("query_start_loc", starts), ("seq_lens", lens), ("logits_rows", starts[1:] - 1))
        reasons = [differing(name, getattr(inputs, name), wanted) for name, wanted in numbers]
        return first_of([tokens_reason(inputs, computed.reshape(-1), batch), *reasons])
