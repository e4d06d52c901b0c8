"""Samples a step's tokens and their logprobs on the device; everything is enqueued without waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.sampling import Need
from executor_svc.batch.slot_sampling import SlotSampling
from executor_svc.batch.step_result import RowLogprobs
from executor_svc.gpu.kernels.sampling.logits import take_best
from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, RowLogprobsKernel, row_logprobs
from executor_svc.gpu.kernels.sampling.sampling import sample
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.gpu.kernels.sampling.state import field as place
from executor_svc.gpu.kernels.slots.slots import StepInputs, padded
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.slots.device_slots import CommittedTokens
from executor_svc.gpu.slots.staging import Download, Fetched, Words
from executor_svc.plan.arrays import BoolArray, FloatArray, IntArray
from executor_svc.plan.limits import Limits

_KEPT_SIZES = 128
"""Sizes whose views of such buffers are kept: to make them takes 20 us."""
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

    @property
    def kinds(self) -> tuple[bool, ...]:
        """What decides which kernels sample."""
        return self.edited, self.drawn, self.filtered, self.floored, self.counted

    @classmethod
    def greedy(cls) -> SamplingMetadata:
        """Return the requirements of slots that take their most likely tokens."""
        return cls(_no_rows())

    @classmethod
    def of_draws(cls) -> SamplingMetadata:
        """Return the requirements that hold for any slots without edits, floors and logprobs."""
        return cls(_no_rows(), drawn=True, filtered=True)

    @classmethod
    def of_edits(cls) -> SamplingMetadata:
        """Return the requirements that hold for any slots without logprobs."""
        return cls(_no_rows(), edited=True, drawn=True, filtered=True, floored=True, counted=True)

    @classmethod
    def of_slots(
        cls, slots: IntArray, sampling: SlotSampling, lists_on_host: BoolArray, vocab: int
    ) -> SamplingMetadata:
        """Return the metadata of these slots [R].

        sampling: the parameters of all slots; lists_on_host: [n], as in `SlotSamplingState`: of these slots the
        device computes logprobs alone.
        """
        with_candidates = sampling["num_candidates"][slots] > 0
        here = ~lists_on_host[slots]
        drawn = here & (sampling["temperature"][slots] > 0)
        filtered = drawn & sampling.on(Need.SEARCH)[slots]
        floored = drawn & sampling.on(Need.FLOOR)[slots]
        logprob_rows = np.flatnonzero((sampling["num_logprobs"][slots] >= 0) & ~with_candidates)
        return cls(
            slots=slots,
            edited=bool((here & sampling.processed[slots]).any()),
            drawn=bool(drawn.any()),
            filtered=bool(filtered.any()),
            floored=bool(floored.any()),
            counted=bool((here & sampling.on(Need.COUNTS)[slots]).any()),
            host_rows=np.flatnonzero(with_candidates | ~here),
            logprob_rows=logprob_rows,
            num_top=np.minimum(sampling["num_logprobs"][slots[logprob_rows]], vocab),
        )


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Buffers for the logprobs of a step, in which each round of sampling has its rows."""

    buffers: DeviceLogprobs
    num_rows: int
    """R, of each round."""
    most: int
    """Padded number of best tokens of each row."""
    is_kept: bool
    """Whether they are at the addresses of all steps with so many rows and best tokens."""

    @classmethod
    def empty(cls, num_rows: int, rounds: int, most: int, device: torch.device) -> StepLogprobs:
        """Return buffers for these rounds of num_rows rows."""
        return cls(DeviceLogprobs.empty(rounds * padded(num_rows), most, device), num_rows, most, is_kept=False)

    @classmethod
    def at(cls, memory: Tensor, num_rows: int, rounds: int, most: int) -> StepLogprobs:
        """Return buffers for these rounds of num_rows rows, at the beginning of memory, int32."""
        rows = rounds * padded(num_rows)
        words = memory[: DeviceLogprobs.num_words(rows, most)]
        return cls(DeviceLogprobs.over(words, rows, most), num_rows, most, is_kept=True)

    def of_round(self, round: int) -> DeviceLogprobs:
        """Return the rows of a round."""
        return self.buffers.of_rows(round * padded(self.num_rows), self.num_rows)

    def columns_of(self, words: Words, rows: IntArray) -> tuple[FloatArray, IntArray, IntArray, FloatArray]:
        """Return the logprobs, ranks, best tokens and their logprobs of these rows of all rounds, from a copy."""
        size, most = padded(len(self.buffers.chosen)), self.most
        chosen, ranks = words[:size].view(np.float32), words[size : 2 * size]
        first, middle = 2 * size, (2 + most) * size
        top_ids, top = words[first:middle].reshape(size, most), words[middle:].view(np.float32).reshape(size, most)
        return chosen[rows], ranks[rows].astype(np.int64), top_ids[rows].astype(np.int64), top[rows]


class PendingLogprobs:
    """Logprobs that are being copied to the host."""

    def __init__(self, fetched: Fetched, logprobs: StepLogprobs, metadata: SamplingMetadata) -> None:
        self._fetched, self._logprobs, self._metadata = fetched, logprobs, metadata

    def wait(self, committed: CommittedTokens) -> RowLogprobs:
        """Wait for the copy; return the logprobs of rows that are not idle, numbered among these.

        Of rows without a token they have no meaning.
        """
        words, metadata = self._fetched.wait(), self._metadata
        if len(committed.ahead) == len(metadata.slots) and not committed.idle.any():
            # A row for each slot, as nearly always.
            rows = there = metadata.logprob_rows
            num_top = metadata.num_top
        else:
            requests = np.full(len(metadata.slots), -1, np.int64)
            requests[metadata.logprob_rows] = np.arange(len(metadata.logprob_rows))
            owners, kept = committed.owners, ~committed.idle
            these = np.flatnonzero(kept & (requests[owners] >= 0))
            there = committed.ahead[these] * padded(self._logprobs.num_rows) + owners[these]
            rows, num_top = (np.cumsum(kept) - 1)[these], metadata.num_top[requests[owners[these]]]
        chosen, ranks, top_ids, top = self._logprobs.columns_of(words, there)
        return RowLogprobs(rows, chosen, ranks, num_top, top_ids, top)


class GpuSampler:
    """Samples the tokens of steps of at most `max_num_seqs` rows, on one stream."""

    def __init__(
        self, limits: Limits, slots: SlotSamplingState, row_logprobs: RowLogprobsKernel = row_logprobs
    ) -> None:
        """row_logprobs: computes logprobs."""
        self.slots, self._row_logprobs = slots, row_logprobs
        records = slots.state.records
        self._vocab, device = limits.vocab_size, records.device
        self.workspace = SamplingWorkspace.empty(limits.max_num_seqs, limits.vocab_size, device)
        self._tokens = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)
        self._errors = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._num_logprobs = records[:, place("num_logprobs")]
        likely_rows = limits.max_num_seqs + padded(1) * (1 + limits.max_drafts)
        num_words = DeviceLogprobs.num_words(likely_rows, _LIKELY_TOP)
        self._download = Download(num_words, device)
        # The copy of a step's logprobs to the host is enqueued before the next step writes its own.
        kept = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._most_words, self._logprobs_at = num_words, lru_cache(_KEPT_SIZES)(partial(StepLogprobs.at, kept))

    def rows(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return the tensors that receive a step's tokens [R] int64 and errors [R] int32."""
        return self._tokens[: inputs.sizes.num_rows], self._errors[: inputs.sizes.num_rows]

    def choose(
        self, logits: Tensor, best: Tensor, inputs: StepInputs, metadata: SamplingMetadata, *, guessed: bool = False
    ) -> None:
        """Enqueue sampling for all rows; logits [L, vocab] float32, best [L] their most likely tokens.

        guessed: whether to sample behind the slots' drafts so far, as if they were known.
        """
        tokens, errors = self.rows(inputs)
        if not (metadata.edited or metadata.drawn):
            take_best(best, inputs.rows, inputs.sources, tokens, errors)
            return
        sample(
            logits, inputs.rows, inputs.sources, self.slots.guessed if guessed else self.slots.state, self.workspace,
            tokens, errors,
            edited=metadata.edited, drawn=metadata.drawn, filtered=metadata.filtered, floored=metadata.floored,
        )  # fmt: skip

    def new_logprobs(self, inputs: StepInputs, metadata: SamplingMetadata) -> StepLogprobs | None:
        """Return buffers for the logprobs of a step; None if none are requested."""
        if not len(metadata.logprob_rows):
            return None
        sizes, most = inputs.sizes, most_top(int(metadata.num_top.max()))
        num_rows, rounds = sizes.num_rows, 1 + sizes.num_drafts
        # PyTorch's launches depend on more than the kernel's: none are repeated.
        is_kept = self._row_logprobs is row_logprobs
        if is_kept and DeviceLogprobs.num_words(rounds * padded(num_rows), most) <= self._most_words:
            return self._logprobs_at(num_rows, rounds, most)
        return StepLogprobs.empty(num_rows, rounds, most, self._tokens.device)

    def compute_logprobs(
        self, logits: Tensor, inputs: StepInputs, metadata: SamplingMetadata, out: DeviceLogprobs
    ) -> None:
        """Enqueue logprobs of the tokens that were chosen last, of rows of these logits."""
        tokens, _ = self.rows(inputs)
        self._row_logprobs(
            logits, inputs.rows, inputs.sources, tokens, self._num_logprobs, self.workspace, out,
            after_sampling=metadata.edited or metadata.drawn,
        )  # fmt: skip

    def fetch_logprobs(self, logprobs: StepLogprobs, metadata: SamplingMetadata) -> PendingLogprobs:
        """Enqueue the copy of a step's logprobs to the host."""
        return PendingLogprobs(self._download.fetch(logprobs.buffers.words), logprobs, metadata)

    def warm_up(self, inputs: StepInputs) -> None:
        """Compile all kernels that sampling may launch, so that no step waits for it; inputs: of one row."""
        logits, no_slots = torch.zeros(1, self._vocab, device=self._tokens.device), _no_rows()
        best = torch.zeros_like(self._tokens[:1])
        if self.slots.draws_on_host:
            self.choose(logits, best, inputs, SamplingMetadata.greedy())
            self._warm_up_logprobs(logits, inputs, drawn=False)
            return
        for edited, (drawn, filtered) in product((False, True), ((False, False), (True, False), (True, True))):
            self.choose(logits, best, inputs, SamplingMetadata(no_slots, edited, drawn, filtered, floored=drawn))
        for drawn in (False, True):
            self._warm_up_logprobs(logits, inputs, drawn=drawn)
        self.slots.count_taken(inputs)

    def _warm_up_logprobs(self, logits: Tensor, inputs: StepInputs, *, drawn: bool) -> None:
        rows, num_top = np.zeros(1, np.int64), np.ones(1, np.int64)
        metadata = SamplingMetadata(_no_rows(), drawn=drawn, logprob_rows=rows, num_top=num_top)
        logprobs = self.new_logprobs(inputs, metadata)
        assert logprobs is not None
        self.compute_logprobs(logits, inputs, metadata, logprobs.of_round(0))


def most_top(num_top: int) -> int:
    """Round up the number of best tokens per row: kernels are compiled for multiples of 16."""
    return padded(max(1, num_top))
