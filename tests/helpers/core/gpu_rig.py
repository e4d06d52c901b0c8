"""The core over the executor of a GPU, and a short load for it. For tests only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.startup.executors import make_executor
from executor_svc.worker.step import StepExecutor
from scheduler_svc.core.types import BeamSpec
from tests.golden.invariance import chat, text, with_fields
from tests.helpers.core.core_chats import Chat
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling


class _Executing:
    """A GPU's executor, plan by plan."""

    def __init__(self, executor: GpuStepExecutor) -> None:
        self._executor, self.slots = executor, executor.slots

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        return self._executor.launch(plan, received_ns).result()

    def clear(self) -> None:
        self._executor.clear()


class GpuRig(Rig):
    """As `Rig`, over the executor of a GPU, without graphs."""

    def _start(self) -> StepExecutor:
        made = make_executor(
            self._model.loaded, self._model.device, self.pools, self._limits, enforce_eager=True,
            drafts=lambda _: self._drafts, adapters=None if self.adapters is None else self.adapters.loader,
        )  # fmt: skip
        assert isinstance(made, GpuStepExecutor)
        return cast("StepExecutor", _Executing(made))


_FEW: dict[str, Any] = {"max_tokens": 5, "priority": 0, "eos_token_ids": frozenset(), "max_drafts": None}
_SCORED = core_sampling(temperature=0.9, seed=1_000_003, num_logprobs=2)


def short_load() -> list[Chat]:
    """Greedy, drawn from the most likely tokens, with logprobs of the prompt and penalties, two samples, and beams."""
    chats = [
        chat("greedy", text(70), with_fields(SequenceSampling(), num_logprobs=2)),
        chat("drawn", text(7), with_fields(_SCORED, top_p=0.9, min_p=0.02)),
        chat("told", text(37), with_fields(_SCORED, num_prompt_logprobs=1, repetition_penalty=1.2)),
        chat("two", text(16), _SCORED, num_samples=2),
        chat("beams", text(9), core_sampling(), num_samples=2, beams=BeamSpec(2)),
    ]
    return [replace(each, spec=replace(each.spec, **_FEW)) for each in chats]


def shortest_load() -> list[Chat]:
    """Two requests of different lengths, with logprobs."""
    chats = [
        chat("told", text(29), with_fields(_SCORED, num_prompt_logprobs=1)),
        chat("greedy", text(41), with_fields(SequenceSampling(), num_logprobs=2)),
    ]
    return [replace(each, spec=replace(each.spec, **_FEW | {"max_tokens": 3})) for each in chats]
