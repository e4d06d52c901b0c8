"""The executor of a model on the CPU with faults, for tests: `--inject`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from executor_svc.batch.forward_batch import ForwardBatch
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.step_result import Computed
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.simulated.injection import Injection
from executor_svc.speculation.drafts import DraftSource
from executor_svc.structured.slot_grammars import SlotGrammars
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import BlockPools, Runner, StepExecutor


class InjectedStepExecutor(StepExecutor):
    """Its faults are errors and logits in the places of real ones, so that everything after them is what it always is.

    An injected error is read by its type and message, as PyTorch's own errors are.
    """

    def __init__(
        self,
        runner: Runner,
        pools: BlockPools,
        limits: Limits,
        injection: Injection,
        drafts: DraftSource | None = None,
        adapters: ModelAdapterLoader | None = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        self._injection = injection
        self._spoiled = _SpoiledRunner(runner)
        super().__init__(self._spoiled, pools, limits, drafts=drafts, adapters=adapters, grammars=grammars)

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        """As StepExecutor does."""
        self._injection.before_step()
        return super().execute(plan, received_ns)

    def _compute(self, scheduled: Scheduled) -> Computed:
        if len(scheduled.slots):
            self._injection.before_compute()
            self._spoiled.rows = self._injection.non_finite_rows(scheduled.logits_slots.tolist())
        return super()._compute(scheduled)


class _SpoiledRunner:
    """A runner in whose next logits these rows are NaN."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.functions = runner.functions
        self.rows: list[int] = []

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._runner.forward(batch)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        logits = self._runner.logits(hidden, rows)
        if not self.rows:
            return logits
        # A copy: the runner knows its own memory, for which it has found the most likely tokens already.
        spoiled = logits.clone()
        spoiled[torch.tensor(self.rows)] = math.nan
        self.rows = []
        return spoiled

    def argmax(self, logits: Tensor) -> IntArray:
        return self._runner.argmax(logits)
