"""Plans of a GPU's warm-up: as many rows of logits as tiles have, and steps that fit into short sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cadenza_common.plan.plan import StepPlan
from executor_svc.batch.slots import Slots
from executor_svc.gpu.kernels.few_bits.linear import TILE_ROWS
from executor_svc.gpu.warm_up import run_largest_steps, run_steps
from executor_svc.plan.limits import Limits


class NotedPlans:
    """An executor that only notes its plans."""

    limits = Limits(40, 40, 200, 64, 131, 0, 8, 64, 0, 1)

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, step: StepPlan, received_ns: int) -> NotedPlans:
        self.plans.append(step)
        return self

    def result(self) -> None: ...

    def clear(self) -> None: ...


def test_the_largest_steps_have_logits_for_every_tile_of_rows() -> None:
    executor = NotedPlans()
    run_largest_steps(executor)  # type: ignore[arg-type]
    sampled = {sum(plan.scheduled_samples) for plan in executor.plans}
    rows = [*(rows for rows in TILE_ROWS if rows < 40), 40]
    assert len(rows) > 2
    assert sampled == {1, *rows}


class AppliedPlans(NotedPlans):
    """An executor that applies plans to slots alone, and takes as many drafts as plans allow."""

    def __init__(self, max_model_len: int) -> None:
        super().__init__()
        self.limits = replace(NotedPlans.limits, max_model_len=max_model_len, max_logprobs=5, max_drafts=1)
        self.slots = Slots(self.limits)

    def launch(self, step: StepPlan, received_ns: int) -> NotedPlans:
        work = self.slots.schedule(self.slots.apply(step))
        num_rows = len(work.rows.slots)
        self.slots.commit(work, np.zeros(num_rows, np.int64), np.ones(num_rows, np.bool_))
        if step.max_drafts:
            self.slots.num_tokens[work.slots] += 1
            self.slots.num_computed_tokens[work.slots] += 1
        return super().launch(step, received_ns)

    def clear(self) -> None:
        self.slots.clear()


@pytest.mark.parametrize("max_model_len", [3, 5, 6, 7, 96, 2000])
def test_steps_of_each_kind_fit_into_short_sequences(max_model_len: int) -> None:
    executor = AppliedPlans(max_model_len)
    run_steps(executor)  # type: ignore[arg-type]
    drafted = sum(plan.max_drafts for plan in executor.plans)
    assert (drafted > 0) == (max_model_len >= 6)
