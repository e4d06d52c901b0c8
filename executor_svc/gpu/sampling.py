"""Samples a step's tokens and their logprobs on the device; everything is enqueued without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.slot_sampling import SlotSampling
from executor_svc.batch.step_result import RowLogprobs
from executor_svc.gpu.kernels.sampling.logits import take_best
from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, row_logprobs
from executor_svc.gpu.kernels.sampling.sampling import sample
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.gpu.kernels.sampling.state import field as place
from executor_svc.gpu.kernels.slots.slots import StepInputs, padded
from executor_svc.gpu.sampling_state import SlotSamplingState
from executor_svc.gpu.staging import Download, Fetched
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.plan import Limits
from executor_svc.plan.sampling import Need

_LIKELY_TOP = 32
"""Steps with at most this many best tokens per row return logprobs through preallocated buffers."""


def _no_rows() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling requirements of the R slots that sample in a step."""

    slots: IntArray
    """[R] slots."""
    edited: bool = False
    """Whether any slot may need edits of its logits."""
    drawn: bool = False
    """Whether any slot has a temperature above 0."""
    filtered: bool = False
    """Whether any of the drawn slots draws from its most likely tokens."""
    floored: bool = False
    """Whether any of the drawn slots has a floor."""
    counted: bool = False
    """Whether any slot needs counts of its tokens."""
    host_rows: IntArray = field(default_factory=_no_rows)
    """Rows for which the host chooses the token or the candidates, ascending."""
    logprob_rows: IntArray = field(default_factory=_no_rows)
    """Rows with logprobs, ascending."""
    num_top: IntArray = field(default_factory=_no_rows)
    """Number of best tokens requested for each of logprob_rows."""

    @classmethod
    def of_slots(
        cls, slots: IntArray, sampling: SlotSampling, lists_on_host: BoolArray, vocab: int
    ) -> SamplingMetadata:
        """Return the metadata of these slots [R].

        sampling: the parameters of all slots; lists_on_host: [n], as in `SlotSamplingState`.
        """
        with_candidates = sampling["num_candidates"][slots] > 0
        drawn = sampling["temperature"][slots] > 0
        filtered = drawn & sampling.on(Need.SEARCH)[slots]
        floored = drawn & sampling.on(Need.FLOOR)[slots]
        logprob_rows = np.flatnonzero((sampling["num_logprobs"][slots] >= 0) & ~with_candidates)
        return cls(
            slots=slots,
            edited=bool(sampling.processed[slots].any()),
            drawn=bool(drawn.any()),
            filtered=bool(filtered.any()),
            floored=bool(floored.any()),
            counted=bool(sampling.on(Need.COUNTS)[slots].any()),
            host_rows=np.flatnonzero(with_candidates | lists_on_host[slots]),
            logprob_rows=logprob_rows,
            num_top=np.minimum(sampling["num_logprobs"][slots[logprob_rows]], vocab),
        )


class PendingLogprobs:
    """Logprobs that are being copied to the host."""

    def __init__(self, fetched: Fetched, num_rows: int, most: int, metadata: SamplingMetadata) -> None:
        """most: padded number of best tokens in the buffer for each of num_rows."""
        self._fetched, self._num_rows, self._most, self._metadata = fetched, num_rows, most, metadata

    def wait(self, kept: BoolArray) -> RowLogprobs:
        """Wait for the copy; return logprobs of the kept rows, numbered among the kept ones. kept: [R]."""
        found = DeviceLogprobs.over(torch.from_numpy(self._fetched.wait()), self._num_rows, self._most)
        is_kept = kept[self._metadata.logprob_rows]
        rows = self._metadata.logprob_rows[is_kept]
        return RowLogprobs(
            rows=(np.cumsum(kept) - 1)[rows],
            chosen=found.chosen.numpy()[rows],
            ranks=found.ranks.numpy()[rows].astype(np.int64),
            num_top=self._metadata.num_top[is_kept],
            top_ids=found.top_ids.numpy()[rows].astype(np.int64),
            top=found.top.numpy()[rows],
        )


class GpuSampler:
    """Samples the tokens of steps of at most `max_num_seqs` rows, on one stream."""

    def __init__(self, limits: Limits, slots: SlotSamplingState) -> None:
        self.slots = slots
        records = slots.state.records
        self._vocab, device = limits.vocab_size, records.device
        self.workspace = SamplingWorkspace.empty(limits.max_num_seqs, limits.vocab_size, device)
        self._tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._errors = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._num_logprobs = records[:, place("num_logprobs")]
        self._download = Download(DeviceLogprobs.num_words(limits.max_num_seqs, _LIKELY_TOP), device)

    def rows(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the tensors that receive a step's tokens [R] int64 and errors [R] int32."""
        return self._tokens[: inputs.sizes.num_rows], self._errors[: inputs.sizes.num_rows]

    def choose(self, logits: Tensor, best: Tensor, inputs: StepInputs, metadata: SamplingMetadata) -> None:
        """Enqueue sampling for all rows; logits [L, vocab] float32, best [L] their most likely tokens."""
        tokens, errors = self.rows(inputs)
        if not (metadata.edited or metadata.drawn):
            take_best(best, inputs.rows, inputs.sources, tokens, errors)
            return
        sample(
            logits, inputs.rows, inputs.sources, self.slots.state, self.workspace, tokens, errors,
            edited=metadata.edited, drawn=metadata.drawn, filtered=metadata.filtered, floored=metadata.floored,
        )  # fmt: skip

    def compute_logprobs(
        self, logits: Tensor, inputs: StepInputs, metadata: SamplingMetadata
    ) -> PendingLogprobs | None:
        """Enqueue logprobs of the chosen tokens of rows of these logits, and their copy; None if none are requested."""
        if not len(metadata.logprob_rows):
            return None
        tokens, _ = self.rows(inputs)
        most = most_top(int(metadata.num_top.max()))
        out = DeviceLogprobs.empty(len(tokens), most, tokens.device)
        row_logprobs(
            logits, inputs.rows, inputs.sources, tokens, self._num_logprobs, self.workspace, out,
            after_sampling=metadata.edited or metadata.drawn,
        )  # fmt: skip
        return PendingLogprobs(self._download.fetch(out.words), len(tokens), most, metadata)

    def warm_up(self, inputs: StepInputs) -> None:
        """Compile all kernels that sampling may launch, so that no step waits for it; inputs: of one row."""
        logits, no_slots = torch.zeros(1, self._vocab, device=self._tokens.device), _no_rows()
        best = torch.zeros_like(self._tokens[:1])
        for edited, (drawn, filtered) in product((False, True), ((False, False), (True, False), (True, True))):
            self.choose(logits, best, inputs, SamplingMetadata(no_slots, edited, drawn, filtered, floored=drawn))
        for drawn in (False, True):
            rows, num_top = np.zeros(1, np.int64), np.ones(1, np.int64)
            metadata = SamplingMetadata(no_slots, drawn=drawn, logprob_rows=rows, num_top=num_top)
            self.compute_logprobs(logits, inputs, metadata)
        self.slots.count_taken(inputs)


def most_top(num_top: int) -> int:
    """Round up the number of best tokens per row: kernels are compiled for multiples of 16."""
    return padded(max(1, num_top))
