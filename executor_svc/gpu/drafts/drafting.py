"""Drafts of a step on a GPU: places for them in its tensors, and those that are made on the host.

The host schedules with bounds: how many drafts a slot has, the device finds out (`kernels.slots.ngram_drafts`), so that
a step with drafts waits for nothing. A source on the host reads tokens: its steps wait for all earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.mirror_slots import MirrorSlots
from executor_svc.batch.ragged import spans
from executor_svc.batch.scheduled import Scheduled
from executor_svc.gpu.kernels.slots.slots import StepSizes
from executor_svc.gpu.slots.device_slots import DeviceSlots, NgramLengths, is_decode
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.speculation.drafting import Drafting, draft_room
from executor_svc.speculation.drafts import DraftSource
from executor_svc.speculation.ngram import NgramSource


@dataclass(frozen=True, slots=True)
class Layout:
    """What a step's tensors have places for."""

    scheduled: Scheduled
    """The step, with a place for each draft that may be made."""
    sizes: StepSizes
    """Padded."""
    most_drafts: int = 0
    """The most drafts of a slot in this step."""


def ngrams_of(source: DraftSource | None) -> NgramLengths | None:
    """Return the lengths of matches of a source whose drafts the device makes; None for others."""
    return NgramLengths(source.min_match, source.max_match) if isinstance(source, NgramSource) else None


class GpuDrafting:
    """Lays out steps with drafts."""

    def __init__(
        self,
        slots: MirrorSlots,
        on_device: DeviceSlots,
        source: DraftSource | None,
        sizes_of: Callable[[Scheduled], StepSizes],
        graphs: Sequence[StepSizes],
        *,
        tokens_of_pass: int = 0,
        on_host: bool = False,
    ) -> None:
        """source: needs no report of computed steps; n-grams are drafted on the device, unless on_host is set. None:
        there are no drafts, but those of a draft model or head, if tokens_of_pass is set.

        sizes_of: returns the padded sizes of a step. graphs: sizes with a graph, of decodes with drafts.
        tokens_of_pass: the most tokens that drafting passes compute of a sequence.
        """
        self._slots, self._on_device = slots, on_device
        self._there = tokens_of_pass > 0 or (ngrams_of(source) is not None and not on_host)
        self._tokens_of_pass = tokens_of_pass
        self._here = None if source is None or self._there else Drafting(slots, source)
        self._sizes_of, self._graphs = sizes_of, graphs

    def clear(self) -> None:
        """Forget all sequences."""
        if self._here is not None:
            self._here.clear()

    def reads_tokens(self, plan: StepPlan) -> bool:
        """Return whether the drafts of this plan need slots with all tokens."""
        return self._here is not None and plan.max_drafts > 0

    def follow(self, plan: StepPlan) -> None:
        """Report a plan that the slots have applied."""
        if self._here is not None:
            self._here.follow(plan)

    def lay_out(
        self, plan: StepPlan, scheduled: Scheduled, undrafted: Callable[[], BoolArray], *, none: bool
    ) -> Layout:
        """Return the layout of a step; those of its drafts that the host makes go with its changes.

        undrafted: returns [num_slots], slots that may have no drafts. none: whether no slot may have any in this step.
        """
        if plan.max_drafts and not none and not len(plan.fork_slots):
            without = undrafted()
            if self._there:
                counts = draft_room(self._slots, plan, scheduled)
                counts[without[scheduled.slots]] = 0
                found = self._with_places(plan, scheduled, counts)
            else:
                found = self._with_drafts(plan, scheduled, without)
            if found is not None:
                return found
        return Layout(scheduled, self._sizes_of(scheduled))

    def _with_places(self, plan: StepPlan, scheduled: Scheduled, counts: IntArray) -> Layout | None:
        """Return the layout with places for so many drafts [S], or fewer; None if there are none, or no room for them.

        In a graph each slot with drafts has as many places as the graph: so the next step has the same layout, and
        sends nothing.
        """
        # All sequences of a step take part in the first pass.
        if not counts.any() or len(counts) * self._tokens_of_pass > self._slots.limits.max_num_batched_tokens:
            return None
        sizes = self._graph(scheduled, int(counts.max()))
        if sizes is not None:
            places = np.where(counts > 0, sizes.num_drafts, 0)
            return Layout(scheduled.with_drafts(places), sizes, plan.max_drafts)
        limits, num_drafting = self._slots.limits, int(np.count_nonzero(counts))
        left = min(
            limits.max_num_seqs - len(scheduled.sampling_slots),
            limits.max_num_batched_tokens - int(scheduled.num_tokens.sum()),
        )
        places = np.minimum(counts, left // num_drafting)
        if not places.any():
            return None
        scheduled = scheduled.with_drafts(places)
        return Layout(scheduled, self._sizes_of(scheduled), plan.max_drafts)

    def _with_drafts(self, plan: StepPlan, scheduled: Scheduled, without: BoolArray) -> Layout | None:
        """Return the layout with the drafts of the source; None if it has none."""
        if self._here is None:
            return None
        drafted = self._here.add(plan, scheduled)
        if drafted.num_drafts is None:
            return None
        counts = np.where(without[scheduled.slots], 0, drafted.num_drafts)
        if not counts.any():
            return None
        layout = self._with_places(plan, scheduled, counts)
        if layout is None:
            return None
        assert layout.scheduled.num_drafts is not None
        counts = np.minimum(counts, layout.scheduled.num_drafts)
        slots, known = scheduled.slots, self._slots.num_tokens[scheduled.slots]
        owner, places = spans(known, counts)
        self._on_device.put_drafts(slots, counts, known, self._slots.token_ids[slots[owner], places].astype(np.int64))
        return layout

    def _graph(self, scheduled: Scheduled, num_drafts: int) -> StepSizes | None:
        """Return the sizes with a graph for a decode with so many drafts, or nearly as many; None if there are none."""
        if not is_decode(scheduled):
            return None
        fitting = [sizes for sizes in self._graphs if sizes.num_seqs >= len(scheduled.slots)]
        enough = [sizes for sizes in fitting if sizes.num_drafts >= num_drafts]
        if enough:
            return min(enough, key=lambda sizes: sizes.num_tokens)
        return max(fitting, key=lambda sizes: (sizes.num_drafts, -sizes.num_tokens), default=None)
