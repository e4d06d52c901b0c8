"""Masks on their way to a device: what it reads, and what is left for rows that the host samples."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cadenza_common.plan.plan import AdmittedSequence, StepPlan
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.scheduled import Scheduled
from executor_svc.plan.arrays import BoolArray, IntArray
from executor_svc.sampling.masks import RowMasks, Words, num_mask_words
from executor_svc.structured.device_masks import DeviceMasks
from tests.helpers.executor.plans import ints

VOCAB, ALL = 64, 2**32 - 1
NUM_SLOTS = 5


class Grammars:
    """Slots 1 to 4 have grammars; the constraint of slot 2 has not begun."""

    recorded = None

    def have(self, slots: IntArray) -> BoolArray:
        return slots > 0

    def wait_while(self, scheduled: Scheduled, is_running: object) -> None: ...

    def follow(self, plan: StepPlan, slots: object) -> None: ...

    def masks(self, scheduled: Scheduled, elapsed_ns: int, is_late: object, out: Words) -> RowMasks:
        rows = ints(1, 3, 4)
        none = np.zeros(NUM_SLOTS, np.bool_)
        return RowMasks(rows, np.stack([np.full(2, 10 + row, np.uint32) for row in rows], out=out[:3]), none, none)


@pytest.mark.parametrize("with_list", [False, True])
def test_rows_of_the_host_keep_their_masks(with_list: bool) -> None:
    allowed = torch.zeros(NUM_SLOTS, num_mask_words(VOCAB), dtype=torch.int32)
    masks = DeviceMasks(Grammars(), NUM_SLOTS, allowed, torch.zeros(NUM_SLOTS), torch.from_numpy)  # type: ignore[arg-type]
    if with_list:
        listed = AdmittedSequence(3, [5], 1, 0, [0], SequenceSampling(allowed_token_ids=ints(0, 33)))
        masks.follow(StepPlan(1, epoch=1, admitted=[listed]), None, VOCAB)  # type: ignore[arg-type]
    slots = ints(*range(NUM_SLOTS))
    ones = np.ones(NUM_SLOTS, np.int64)
    scheduled = Scheduled(slots, ones, ones.astype(np.bool_), slots[:0], slots, None, slots[:0])
    clock = SimpleNamespace(is_running=lambda: False, elapsed_ns=lambda: 0)

    step = masks.send(scheduled, clock, None)  # type: ignore[arg-type]

    assert step is not None
    of_device = [[11, 11], [ALL, ALL], [13 & 1, 13 & 2] if with_list else [13, 13], [14, 14]]
    assert allowed.numpy().view(np.uint32)[1:].tolist() == of_device
    of_host = step.of_host_rows(ints(1, 3, 4))
    assert (of_host.rows.tolist(), of_host.bits[:, 0].tolist()) == ([0, 1, 2], [11, 13, 14])
