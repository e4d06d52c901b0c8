"""Choosing a step's tokens on the device, and telling their logprobs: everything is enqueued, nothing waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.sampling_columns import SlotSampling
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
"""Best tokens beside each, up to which logprobs come by buffers that are kept."""


def _no_rows() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the R slots that sample in a step ask for."""

    slots: IntArray
    """[R]."""
    edited: bool = False
    """May any of their logits have to be edited."""
    drawn: bool = False
    """Has any a temperature above 0."""
    filtered: bool = False
    """Do any of those draw from their most likely tokens."""
    floored: bool = False
    """Have any of those a floor."""
    counted: bool = False
    """Does any count its tokens."""
    here: IntArray = field(default_factory=_no_rows)
    """Rows whose token, or candidates for it, the host chooses, ascending."""
    told: IntArray = field(default_factory=_no_rows)
    """Rows whose logprobs are told, ascending."""
    num_top: IntArray = field(default_factory=_no_rows)
    """Best tokens that each of these wants beside."""

    @classmethod
    def by(cls, slots: IntArray, sampling: SlotSampling, without_room: BoolArray, vocab: int) -> Wanted:
        """Of these slots [R], by the parameters of all slots; without_room: [n], as `SlotSamplingState` has it."""
        waits = sampling["num_candidates"][slots] > 0
        drawn = sampling["temperature"][slots] > 0
        filtered = drawn & sampling.on(Need.SEARCH)[slots]
        floored = drawn & sampling.on(Need.FLOOR)[slots]
        told = np.flatnonzero((sampling["num_logprobs"][slots] >= 0) & ~waits)
        return cls(
            slots=slots,
            edited=bool(sampling.processed[slots].any()),
            drawn=bool(drawn.any()),
            filtered=bool(filtered.any()),
            floored=bool(floored.any()),
            counted=bool(sampling.on(Need.COUNTS)[slots].any()),
            here=np.flatnonzero(waits | without_room[slots]),
            told=told,
            num_top=np.minimum(sampling["num_logprobs"][slots[told]], vocab),
        )


class PendingLogprobs:
    """Logprobs on their way to the host."""

    def __init__(self, fetched: Fetched, num_rows: int, most: int, wanted: Wanted) -> None:
        """most: best tokens that there is room for beside each of num_rows, padded."""
        self._fetched, self._num_rows, self._most, self._wanted = fetched, num_rows, most, wanted

    def wait(self, kept: BoolArray) -> RowLogprobs:
        """Wait for them; of the rows [R] that are kept, by their place among these."""
        found = DeviceLogprobs.over(torch.from_numpy(self._fetched.wait()), self._num_rows, self._most)
        there = kept[self._wanted.told]
        told = self._wanted.told[there]
        return RowLogprobs(
            rows=(np.cumsum(kept) - 1)[told],
            chosen=found.chosen.numpy()[told],
            ranks=found.ranks.numpy()[told].astype(np.int64),
            num_top=self._wanted.num_top[there],
            top_ids=found.top_ids.numpy()[told].astype(np.int64),
            top=found.top.numpy()[told],
        )


class GpuSampler:
    """The tokens of steps of at most `max_num_seqs` rows, for one stream."""

    def __init__(self, limits: Limits, slots: SlotSamplingState) -> None:
        self.slots = slots
        records = slots.state.records
        self._vocab, device = limits.vocab_size, records.device
        self.workspace = SamplingWorkspace.empty(limits.max_num_seqs, limits.vocab_size, device)
        self._tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._errors = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._asked = records[:, place("num_logprobs")]
        self._download = Download(DeviceLogprobs.num_words(limits.max_num_seqs, _LIKELY_TOP), device)

    def rows(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Where a step's tokens [R] int64 and errors [R] int32 are written."""
        return self._tokens[: inputs.sizes.num_rows], self._errors[: inputs.sizes.num_rows]

    def choose(self, logits: Tensor, best: Tensor, inputs: StepInputs, wanted: Wanted) -> None:
        """Enqueue choosing for all rows; logits [L, vocab] float32, best [L] their likeliest tokens."""
        tokens, errors = self.rows(inputs)
        if not (wanted.edited or wanted.drawn):
            take_best(best, inputs.rows, inputs.sources, tokens, errors)
            return
        sample(
            logits, inputs.rows, inputs.sources, self.slots.state, self.workspace, tokens, errors,
            edited=wanted.edited, drawn=wanted.drawn, filtered=wanted.filtered, floored=wanted.floored,
        )  # fmt: skip

    def tell(self, logits: Tensor, inputs: StepInputs, wanted: Wanted) -> PendingLogprobs | None:
        """Enqueue logprobs of what was chosen for rows of these logits, and their copy; None if nobody asks."""
        if not len(wanted.told):
            return None
        tokens, _ = self.rows(inputs)
        most = most_top(int(wanted.num_top.max()))
        out = DeviceLogprobs.empty(len(tokens), most, tokens.device)
        row_logprobs(
            logits, inputs.rows, inputs.sources, tokens, self._asked, self.workspace, out,
            after_sampling=wanted.edited or wanted.drawn,
        )  # fmt: skip
        return PendingLogprobs(self._download.fetch(out.words), len(tokens), most, wanted)

    def warm_up(self, inputs: StepInputs) -> None:
        """Compile all that choosing may launch, so that no step waits for that; inputs: of one row."""
        logits, nobody = torch.zeros(1, self._vocab, device=self._tokens.device), _no_rows()
        best = torch.zeros_like(self._tokens[:1])
        for edited, (drawn, filtered) in product((False, True), ((False, False), (True, False), (True, True))):
            self.choose(logits, best, inputs, Wanted(nobody, edited, drawn, filtered, floored=drawn))
        for drawn in (False, True):
            told, num_top = np.zeros(1, np.int64), np.ones(1, np.int64)
            self.tell(logits, inputs, Wanted(nobody, drawn=drawn, told=told, num_top=num_top))
        self.slots.count_taken(inputs)


def most_top(num_top: int) -> int:
    """Round up what logprobs have room for beside each token: kernels are compiled for multiples of 16."""
    return padded(max(1, num_top))
