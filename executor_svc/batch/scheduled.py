"""The work of one step: the tokens that slots compute, and the rows of logits from which they sample."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.ragged import spans
from executor_svc.plan.arrays import BoolArray, IntArray, ints


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The choices of a step, Q rows: one for each sampling slot, followed by one after each of the slot's drafts."""

    slots: IntArray
    """[Q] ascending; a slot occurs once, and once more for each of its drafts."""
    ahead: IntArray | None
    """[Q] number of the slot's drafts before each row; None: there are no drafts."""
    sources: IntArray | None
    """[Q] the logits row that each reads; None: row i for row i."""
    candidates: IntArray
    """[C] rows, ascending, of slots that report candidates and sample no token."""

    def takes_token(self, valid: BoolArray) -> BoolArray:
        """Return [Q]: whether each row gives a token, drafts accepted; valid: [Q], whether it has not failed."""
        if not len(self.candidates):
            return valid
        taken = valid.copy()
        taken[self.candidates] = False
        return taken

    def take(self, rows: IntArray) -> SampledRows:
        """Return some of the rows [n], in this order, as rows without candidates."""
        return SampledRows(
            self.slots[rows],
            None if self.ahead is None else self.ahead[rows],
            rows if self.sources is None else self.sources[rows],
            rows[:0],
        )


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The work of one step, slots ascending."""

    slots: IntArray
    """[S] slots that compute one token or more."""
    num_tokens: IntArray
    """[S], drafts included."""
    samples: BoolArray
    """[S]: whether the slot's last token has a logits row, and each draft another one. There are L rows, in slot order.
    """
    idle_slots: IntArray
    """Slots that the plan lists for sampling but that have stopped, and their forks: they report no token."""
    sampling_slots: IntArray
    """[R] slots that sample from a logits row, forks included."""
    sources: IntArray | None
    """[R] the logits row of each sampling slot; None: row i for slot i, as there are no forks and R is L. With drafts,
    the first of a source's rows."""
    candidates: IntArray
    """[C] indices into sampling_slots, ascending, of slots that report candidates and sample no token."""
    num_drafts: IntArray | None = None
    """[S] number of drafts at the end of each slot's tokens; None: there are no drafts."""
    drafted: SampledRows | None = None
    """The rows with drafts."""
    is_one_each: bool = False
    """Whether each of the slots computes one token, behind its prompt's last but one, and samples from its own row."""
    is_greedy: bool = False
    """Whether it is known that all of its rows are greedy, as in `SlotSampling.greedy`."""
    rows: SampledRows = field(init=False, repr=False, compare=False)
    """The rows from which the step samples: without drafts one for each of sampling_slots."""

    def __post_init__(self) -> None:
        rows = self.drafted or SampledRows(self.sampling_slots, None, self.sources, self.candidates)
        object.__setattr__(self, "rows", rows)

    @property
    def logits_slots(self) -> IntArray:
        """[L] the slot of each row of logits."""
        slots = self.slots[self.samples]
        return slots if self.num_drafts is None else slots.repeat(1 + self.num_drafts[self.samples])

    @property
    def logits_rows(self) -> IntArray:
        """[L] indices into the step's T tokens of those with logits: a sampling slot's last token, and its drafts."""
        last: IntArray = self.num_tokens.cumsum()[self.samples] - 1
        if self.num_drafts is None:
            return last
        num_drafts = self.num_drafts[self.samples]
        return spans(last - num_drafts, 1 + num_drafts)[1]

    @property
    def has_forks(self) -> bool:
        """Whether a slot may read another's logits."""
        return (self.sources if self.drafted is None else self.drafted.sources) is not None

    def takes_token(self, valid: BoolArray) -> BoolArray:
        """As `SampledRows.takes_token`."""
        return self.rows.takes_token(valid)

    def with_idle(self, idle: BoolArray) -> Scheduled:
        """Return the work with some sampling slots made idle; idle: [R]. It has neither forks nor candidates."""
        samples = self.samples.copy()
        samples[samples] = ~idle
        return replace(
            self,
            samples=samples,
            sampling_slots=self.sampling_slots[~idle],
            idle_slots=np.sort(np.concatenate((self.idle_slots, self.sampling_slots[idle]))),
            is_one_each=False,
        )

    def with_drafts(self, num_drafts: IntArray) -> Scheduled:
        """Return the step with drafts after the slots' tokens; num_drafts: [S], 0 for slots that do not sample."""
        num_rows = 1 + num_drafts[self.samples]
        starts = num_rows.cumsum() - num_rows
        sources = starts if self.sources is None else starts[self.sources]
        counts = np.ones(len(self.sampling_slots), np.int64)
        # Forks and their sources have no drafts, so a slot with drafts reads its own rows.
        counts[np.searchsorted(self.sampling_slots, self.slots)[num_drafts > 0]] += num_drafts[num_drafts > 0]
        owner, read = spans(sources, counts)
        rows = SampledRows(
            slots=self.sampling_slots[owner],
            ahead=read - sources[owner],
            sources=None if self.sources is None else read,
            candidates=(counts.cumsum() - counts)[self.candidates],
        )
        return replace(
            self,
            num_tokens=self.num_tokens + num_drafts,
            num_drafts=num_drafts,
            sources=sources,
            drafted=rows,
            is_one_each=False,
        )


def one_each(slots: IntArray, candidates: IntArray, *, is_greedy: bool) -> Scheduled:
    """Return the work of a step in which each of the slots [S] that are ready computes one token.

    candidates, is_greedy: as in `Scheduled`.
    """
    ones = np.ones(len(slots), np.int64)
    return Scheduled(
        slots=slots,
        num_tokens=ones,
        samples=ones.astype(np.bool_),
        idle_slots=slots[:0],
        sampling_slots=slots,
        sources=None,
        candidates=candidates,
        is_one_each=True,
        is_greedy=is_greedy,
    )


class NamedSlots(NamedTuple):
    """The slots that a plan schedules by name, [n] each."""

    slots: IntArray
    num_tokens: IntArray
    samples: BoolArray


def named_slots(plan: StepPlan) -> NamedSlots:
    """Return the plan's columns as arrays."""
    samples: BoolArray = ints(plan.scheduled_samples).astype(np.bool_)
    return NamedSlots(ints(plan.scheduled_slots), ints(plan.scheduled_num_tokens), samples)


def check_counts(part: NamedSlots, left: IntArray, running: BoolArray) -> None:
    """Check the counts of named slots: they compute known tokens, and sample only after all of these; [n] each.

    left: the known tokens that are not computed. running: which have not stopped. Raises InvalidPlan.
    """
    over = running & (part.num_tokens > left)
    if over.any():
        i = over.argmax()
        raise InvalidPlan(
            f"scheduled: slot {part.slots[i]} would compute {part.num_tokens[i]} tokens, but only {left[i]} of its "
            "known tokens are not computed"
        )
    early = running & part.samples & ((part.num_tokens < left) | (part.num_tokens == 0))
    if early.any():
        i = early.argmax()
        raise InvalidPlan(
            f"scheduled: slot {part.slots[i]} would sample after {part.num_tokens[i]} of {left[i]} tokens that are "
            "not computed: it must compute all its known tokens, and one at least"
        )
