"""The same plans in the host's slots and in the device's, step by step, and what the device must hold after each part.

What is expected is computed as the CPU's executor does: by `batch.slots`, `batch.forward_batch` and `sampling`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.forward_batch import build_batch
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.batch.step_result import SampledTokens
from executor_svc.gpu.checks.steps.requests import DRAFTED, CheckedPlans, UnevenDrafts, drafted_logits
from executor_svc.gpu.checks.steps.words import differing, first_of, lists_of_slot, numbers_of, tokens_reason
from executor_svc.gpu.kernels.slots.commit import IDLE
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.sampling.sampler import GpuSampler
from executor_svc.gpu.sampling.state import SlotSamplingState
from executor_svc.gpu.slots.device_slots import DeviceSlots, NgramLengths
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.plan.limits import Limits
from executor_svc.sampling.functions import RowFunctions
from executor_svc.sampling.row_math import argmax
from executor_svc.sampling.sample_step import choose
from executor_svc.speculation.drafting import Drafting
from executor_svc.speculation.ngram import NgramSource
from executor_svc.speculation.verification import accept_drafts

DraftsBy = Literal["host", "ngrams", "passes"]
"""What makes the drafts of steps: the host, the device from what a text repeats, or a draft model or head there."""
_PADDING = 3
_STAGING_WORDS = 1 << 15
"""Less than the first plan's changes, which are sent in pieces."""
_NUMBERS = ("num_tokens", "num_prompt_tokens", "num_computed_tokens", "stopped")


class CheckedHistory:
    """Slots on the host and on the device, which run the same plans."""

    def __init__(self, real: Limits, device: torch.device, functions: RowFunctions, drafts: DraftsBy) -> None:
        """real: of the executor."""
        self.plans = CheckedPlans.of(real)
        limits = self.plans.limits
        ngrams = NgramSource(limits)
        lengths = NgramLengths(ngrams.min_match, ngrams.max_match) if drafts == "ngrams" else None
        self.truth, self.functions, self.device = Slots(limits), functions, device
        self.drafting = Drafting(self.truth, UnevenDrafts(limits) if drafts == "passes" else ngrams)
        extra = SlotSamplingState.extra_words(limits)
        self.slots = DeviceSlots(limits, device, staging_words=_STAGING_WORDS, extra_words=extra, ngrams=lengths)
        self.drafts = drafts
        self.sampling = SlotSamplingState(limits, self.slots)
        self.sampler = GpuSampler(limits, self.sampling)

    def steps(self) -> Iterator[CheckedStep]:
        """Yield the steps; each must be committed before the next."""
        yield CheckedStep.of(self, 1, self.plans.first())
        second = CheckedStep.of(self, 2, self.plans.second(self.truth))
        yield second
        # The planner of the third step does not know that a slot has stopped in the second.
        behind = _as_if_none_stopped(second)
        yield CheckedStep.of(self, 3, self.plans.decode(), behind)
        if self.plans.limits.max_drafts:
            most = max(1, self.plans.limits.max_drafts - 1)
            yield CheckedStep.of(self, DRAFTED, self.plans.decode(most))
            if self.drafts == "passes":
                yield CheckedStep.of(self, DRAFTED + 1, self.plans.fewer(self.truth))
                yield CheckedStep.of(self, DRAFTED + 2, self.plans.decode(most, self.truth))
                yield CheckedStep.of(self, DRAFTED + 3, self.plans.decode(most))

    def state_reason(self) -> str | None:
        """Return how the device's slots differ from the host's."""
        truth, state, live = self.truth, self.slots.state, np.flatnonzero(self.truth.admitted)
        reasons = [differing(name, getattr(state, name)[live], getattr(truth, name)[live]) for name in _NUMBERS]
        reasons.append(differing("min_tokens", state.min_tokens[live], truth.sampling["min_tokens"][live]))
        reasons.append(differing("max_drafts", state.max_drafts[live], truth.max_drafts[live]))
        tokens, tables = state.token_ids.cpu(), state.tables.cpu()
        for slot in live.tolist():
            known, blocks = int(truth.num_tokens[slot]), int(truth.places.num_blocks[:, slot].min())
            reasons.append(differing("token_ids", tokens[slot, :known], truth.token_ids[slot, :known]))
            reasons.append(differing("block tables", tables[slot, :, :blocks], truth.tables[slot, :, :blocks]))
        return first_of(reasons)

    def parameters_reason(self) -> str | None:
        """Return how the sampling parameters on the device differ from those of the requests."""
        records, reasons = self.sampling.state.records.cpu().numpy(), list[str | None]()
        lists = self.sampling.state.lists
        for slot in np.flatnonzero(self.truth.admitted).tolist():
            wanted = self.plans.special[slot].sampling
            reasons.append(numbers_of(records[slot], wanted))
            reasons += lists_of_slot(records[slot], lists, wanted)
        return first_of(reasons)

    def counts_reason(self) -> str | None:
        """Return how the counts of tokens differ from those of the histories."""
        truth, vocab, reasons = self.truth, self.plans.limits.vocab_size, list[str | None]()
        for slot in np.flatnonzero(truth.admitted).tolist():
            sampling = self.plans.special[slot].sampling
            if sampling.repetition_penalty == 1 and not (sampling.frequency_penalty or sampling.presence_penalty):
                continue
            prompt, known = int(truth.num_prompt_tokens[slot]), int(truth.num_tokens[slot])
            counts = 2 * np.bincount(truth.token_ids[slot, prompt:known], minlength=vocab)
            counts[truth.token_ids[slot, :prompt]] |= 1
            reasons.append(differing("counts", self.sampling.state.counts[slot], counts))
        return first_of(reasons)


@dataclass(slots=True)
class CheckedStep:
    """A step on both; its parts in the order of methods."""

    history: CheckedHistory
    number: int
    plan: StepPlan
    planned: Scheduled
    """As the planner knows it, with places for drafts."""
    actual: Scheduled
    """What is computed: without slots that have stopped, with the drafts that are made."""
    sizes: StepSizes
    logits: Tensor
    """[L, vocab] on the device, with padding."""
    best: Tensor
    """[L]."""
    sampled: SampledTokens
    """What the host samples from them, for actual.rows."""
    found: SampledTokens
    """The same with NOT_ACCEPTED behind drafts that are not accepted."""

    @classmethod
    def of(cls, history: CheckedHistory, number: int, plan: StepPlan, planner: Slots | None = None) -> CheckedStep:
        """Apply a plan to the host's slots, and sample there. planner: slots that do not know who has stopped."""
        truth = history.truth
        plan = truth.apply(plan)
        planned = (planner or truth).schedule(plan)
        actual = truth.schedule(plan)
        history.drafting.follow(plan)
        if planner is None:
            planned = actual = history.drafting.add(plan, actual)
            if actual.num_drafts is not None:
                # One place more than drafts, which the device leaves out.
                places = np.minimum(actual.num_drafts + (actual.num_drafts > 0), truth.limits.max_drafts)
                planned = truth.schedule(plan).with_drafts(places)
        num_drafts = 0 if planned.num_drafts is None else int(planned.num_drafts.max())
        counts = (
            int(planned.num_tokens.sum()), len(planned.slots), len(planned.logits_slots), len(planned.sampling_slots),
        )  # fmt: skip
        tokens, seqs, rows, choices = (count + _PADDING for count in counts)
        sizes = StepSizes(tokens, seqs, rows, choices, num_drafts)
        if not num_drafts and counts[0] == counts[1] == counts[3]:
            sizes = StepSizes.decode(counts[0] + _PADDING)
        x = history.plans.logits(planned.logits_slots, number)
        if num_drafts:
            drafted_logits(x, _drafts_after(truth, planned, actual))
        here = torch.from_numpy(x[_computed_rows(planned, actual)])
        with np.errstate(all="ignore"):
            sampled = choose(here, argmax(here), truth, actual, history.functions)
        found = accept_drafts(truth, actual, sampled)
        logits = torch.zeros(sizes.num_logits, x.shape[1])
        logits[: len(x)] = torch.from_numpy(x)
        best = torch.from_numpy(argmax(logits))
        device = history.device
        return cls(
            history, number, plan, planned, actual, sizes, logits.to(device), best.to(device), sampled, found
        )  # fmt: skip

    @property
    def inputs(self) -> StepInputs:
        return self.history.slots.inputs(self.sizes)

    @property
    def rounds(self) -> range:
        return range(1 + self.sizes.num_drafts)

    def sent(self) -> str | None:
        """Send the plan's changes; return how the slots on the device are wrong then."""
        history, slots = self.history, self.history.slots
        without = np.zeros(slots.limits.num_slots, np.bool_)
        history.sampling.apply(self.plan, slots.apply(self.plan), without)
        if self.planned.num_drafts is not None and history.drafts == "host":
            self._put_drafts()
        slots.stage(self.planned, self.sizes, self.plan.max_drafts)
        return first_of([history.state_reason(), history.parameters_reason()])

    def _drafts(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return of each slot the number of drafts and of known tokens, and all drafts, joined."""
        truth, slots, counts = self.history.truth, self.actual.slots, self.actual.num_drafts
        assert counts is not None
        known = truth.num_tokens[slots]
        owner, places = spans(known, counts)
        return counts, known, truth.token_ids[slots[owner], places].astype(np.int64)

    def _put_drafts(self) -> None:
        self.history.slots.put_drafts(self.actual.slots, *self._drafts())

    def built(self) -> str | None:
        """Build the step's tensors; return how they are wrong."""
        self._build()
        return first_of([self._tokens_reason(), self._sequences_reason(), self._rows_reason()])

    def _build(self) -> None:
        sizes, planned = self.sizes, self.planned
        one_each = sizes.num_tokens == sizes.num_seqs and bool((planned.num_tokens == 1).all())
        self.history.slots.launch_build(sizes, one_each)

    def drafted(self) -> str | None:
        """Let the device make the drafts of a step that has some; return how they are wrong."""
        self._build()
        state, slots = self.history.slots.state, self.actual.slots
        counts, known, drafts = self._drafts()
        owner, places = spans(known, counts)
        found = state.token_ids.cpu().numpy()[slots[owner], places]
        return first_of([
            differing("number of drafts", state.num_drafts[slots], counts), differing("drafts", found, drafts),
        ])  # fmt: skip

    def _live(self) -> BoolArray:
        return np.isin(self.planned.slots, self.actual.slots)

    @property
    def counts(self) -> IntArray:
        """[S]: tokens of each sequence in the tensors, without places of drafts that were not made."""
        return self.planned.num_tokens if self.planned.num_drafts is None else self.actual.num_tokens

    def _tokens_reason(self) -> str | None:
        batch = build_batch(self.history.truth, self.actual)
        assert batch is not None
        computed = np.repeat(self._live(), self.counts)
        computed = np.pad(computed, (0, self.sizes.num_tokens - len(computed)))
        return tokens_reason(self.inputs, computed, batch)

    def _sequences_reason(self) -> str | None:
        inputs, planned, truth, live = self.inputs, self.planned, self.history.truth, self._live()
        size, seqs = truth.limits.block_size, len(planned.slots)
        lens = np.zeros(self.sizes.num_seqs, np.int64)
        lens[:seqs][live] = truth.num_computed_tokens[self.actual.slots] + self.actual.num_tokens
        starts = np.concatenate(([0], self.counts.cumsum()))
        reasons = [
            differing("query_start_loc", inputs.query_start_loc[: seqs + 1], starts),
            differing("seq_lens", inputs.seq_lens, lens),
        ]
        tables = self.history.slots.buffers.tables.cpu()
        for index, slot in zip(np.flatnonzero(live).tolist(), self.actual.slots.tolist(), strict=True):
            blocks = -(-int(lens[index]) // size)
            reasons.append(differing("tables", tables[index, :, :blocks], truth.tables[slot, :, :blocks]))
        return first_of(reasons)

    def _rows_reason(self) -> str | None:
        inputs, planned, truth = self.inputs, self.planned, self.history.truth
        slots, num_rows = planned.sampling_slots, self.sizes.num_rows
        live = np.isin(slots, self.actual.sampling_slots)
        rows, positions, sources = np.full(num_rows, -1), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        rows[: len(slots)][live] = slots[live]
        positions[: len(slots)][live] = truth.num_tokens[slots[live]]
        sources[: len(slots)] = np.arange(len(slots)) if planned.sources is None else planned.sources
        logits_rows = np.zeros(self.sizes.num_logits, np.int64)
        logits_rows[: len(planned.logits_rows)] = _logits_rows(planned, self.actual)
        return first_of([
            differing("rows", inputs.rows, rows), differing("sample_positions", inputs.sample_positions, positions),
            differing("sources", inputs.sources, sources), differing("logits_rows", inputs.logits_rows, logits_rows),
        ])  # fmt: skip

    def rows_of(self, round: int) -> tuple[IntArray, IntArray]:
        """Return the rows of the device that sample in a round, and for each its row among actual.rows."""
        rows = self.actual.rows
        ahead = np.zeros_like(rows.slots) if rows.ahead is None else rows.ahead
        (here,) = ((ahead == round) & ((self.found.errors != IDLE) | (round == 0))).nonzero()
        there: IntArray = np.searchsorted(self.planned.sampling_slots, rows.slots[here])
        return there, here

    def set_tokens(self, round: int) -> None:
        """Let the device have chosen what the host has, in a round; of padding what may not be read."""
        tokens, errors = self.history.sampler.rows(self.inputs)
        there, here = self.rows_of(round)
        chosen, wrong = np.full(self.sizes.num_rows, 2**31 - 1), np.full(self.sizes.num_rows, 3)
        chosen[there], wrong[there] = self.sampled.token_ids[here], self.sampled.errors[here]
        tokens.copy_(torch.from_numpy(chosen))
        errors.copy_(torch.from_numpy(wrong))

    def committed(self, round: int) -> str | None:
        """Commit a round's tokens; after the last one, return how slots and results are wrong."""
        slots, history = self.history.slots, self.history
        slots.launch_commit(self.sizes, *history.sampler.rows(self.inputs), round)
        if round != self.rounds[-1]:
            return None
        history.truth.commit(self.actual, self.found.token_ids, self.found.valid)
        return first_of([self._results_reason(), history.state_reason()])

    def _results_reason(self) -> str | None:
        slots, planned, found = self.history.slots, self.planned, self.found
        got = slots.fetch(planned, self.sizes).wait()
        rows = planned if planned.num_drafts is None else self.actual
        live = np.isin(rows.rows.slots, self.actual.rows.slots)
        errors, taken = np.full(len(live), IDLE), np.full(len(live), -1)
        errors[live] = found.errors
        takes = self.actual.takes_token(found.valid)
        taken[live] = np.where(takes, found.token_ids, -1)
        return first_of([differing("errors", got.errors, errors), differing("results", got.token_ids, taken)])


def _computed_rows(planned: Scheduled, actual: Scheduled) -> BoolArray:
    """Return [L]: whether a planned row of logits is computed: of no slot that has stopped, behind a draft that is."""
    rows: BoolArray = np.isin(planned.logits_slots, actual.logits_slots)
    if planned.num_drafts is not None:
        ahead, made = _of_rows(planned, actual)
        rows &= ahead <= made
    return rows


def _of_rows(planned: Scheduled, actual: Scheduled) -> tuple[IntArray, IntArray]:
    """Return of each row of logits [L] the places for drafts before it, and the drafts of its slot that are made."""
    assert planned.num_drafts is not None
    assert actual.num_drafts is not None
    places = 1 + planned.num_drafts[planned.samples]
    owner, ahead = spans(np.zeros_like(places), places)
    return ahead, actual.num_drafts[actual.samples][owner]


def _logits_rows(planned: Scheduled, actual: Scheduled) -> IntArray:
    """Return [L] the token of each row of logits: of a draft that is not made, the last one of its sequence."""
    if planned.num_drafts is None:
        return planned.logits_rows
    ahead, made = _of_rows(planned, actual)
    ends = actual.num_tokens.cumsum()[actual.samples]
    rows: IntArray = ends.repeat(1 + planned.num_drafts[planned.samples]) - 1 - made + np.minimum(ahead, made)
    return rows


def _drafts_after(truth: Slots, planned: Scheduled, actual: Scheduled) -> list[int]:
    """Return the draft behind each row of logits, -1 where there is none."""
    ahead, made = _of_rows(planned, actual)
    slots = planned.logits_slots
    drafts = truth.token_ids[slots, np.minimum(truth.num_tokens[slots] + ahead, truth.limits.max_model_len)]
    found: list[int] = np.where(ahead < made, drafts, -1).tolist()
    return found


def _as_if_none_stopped(step: CheckedStep) -> Slots:
    """Return the slots of a planner who takes it that each slot that went on in this committed step still does."""
    slots = copy.deepcopy(step.history.truth)
    going = step.actual.sampling_slots[step.found.valid]
    slots.stopped[going] = False
    return slots
