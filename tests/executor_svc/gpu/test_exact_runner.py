"""A whole model on the GPU's kernels in exact mode: what requests get, to the bit, however they are batched.

The core plans; every request's tokens and logprobs must be those that it gets alone. The interpreter multiplies in the
order of columns (`ordered_products`), so that what may differ is what the kernels are launched with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.startup.executors import make_executor
from executor_svc.worker.step import StepExecutor
from scheduler_svc.core.types import BeamSpec
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.invariance import chat, text, with_fields
from tests.helpers.core.core_chats import Chat, Outcome, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling

pytestmark = pytest.mark.slow


class Executing:
    """A GPU's executor, plan by plan."""

    def __init__(self, executor: GpuStepExecutor) -> None:
        self._executor, self.slots = executor, executor.slots

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        return self._executor.launch(plan, received_ns).result()

    def clear(self) -> None:
        self._executor.clear()


class GpuRig(Rig):
    """The core over the executor of a GPU."""

    def _start(self) -> StepExecutor:
        made = make_executor(
            self._model.loaded, self._model.device, self.pools, self._limits, enforce_eager=True,
            drafts=lambda _: self._drafts,
        )  # fmt: skip
        assert isinstance(made, GpuStepExecutor)
        return cast("StepExecutor", Executing(made))


def load() -> list[Chat]:
    scored = core_sampling(temperature=0.9, seed=1_000_003, num_logprobs=2)
    few: dict[str, Any] = {"max_tokens": 5, "priority": 0, "eos_token_ids": frozenset(), "max_drafts": None}
    chats = [
        chat("greedy", text(70), with_fields(SequenceSampling(), num_logprobs=2)),
        chat("drawn", text(7), with_fields(scored, top_p=0.9, min_p=0.02)),
        chat("told", text(37), with_fields(scored, num_prompt_logprobs=1, repetition_penalty=1.2)),
        chat("two", text(16), scored, num_samples=2),
        chat("beams", text(9), core_sampling(), num_samples=2, beams=BeamSpec(2)),
    ]
    return [replace(each, spec=replace(each.spec, **few)) for each in chats]


ALONE = Setting(num_blocks=64, max_num_batched_tokens=96, depth=1, arrivals="alone")
SETTINGS = {
    "together": Setting(num_blocks=64, max_num_batched_tokens=128),
    "small chunks, other blocks": Setting(block_size=8, num_blocks=64, max_num_batched_tokens=23, max_num_seqs=6),
    "few blocks": Setting(
        block_size=8, num_blocks=15, num_host_blocks=40, max_num_batched_tokens=40, max_num_seqs=8,
        options={"preemption": "swap"},
    ),
    "failover": Setting(num_blocks=64, max_num_batched_tokens=60, loses_every=7),
}  # fmt: skip


def outcome(model: Model, setting: Setting) -> Outcome:
    rig = GpuRig(model, setting)
    return rig.run(load())


@pytest.fixture
def exact(tmp_path: Path) -> Model:
    folder = make_checkpoint(
        tmp_path, "llama", vocab_size=131, num_hidden_layers=1, head_dim=64, hidden_size=64, intermediate_size=96,
        torch_dtype=torch.bfloat16,
    )  # fmt: skip
    return Model(folder, device="cuda", numerics="exact", dtype="bfloat16")


def test_requests_get_what_they_get_alone(exact: Model, ordered_products: None) -> None:
    expected = outcome(exact, ALONE)
    for name, setting in SETTINGS.items():
        found = outcome(exact, setting)
        for key, alone in expected.items():
            assert found[key] == alone, (name, key)
