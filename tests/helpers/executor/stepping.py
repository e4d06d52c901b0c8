"""A StepExecutor over a real tiny model, plan by plan, without a thread or a service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cadenza_common.plan.result import StepResult, StepStatus
from executor_svc.config import ExecutorConfig
from executor_svc.plan.limits import Limits
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.adapters import with_adapters
from executor_svc.startup.executors import make_executor
from executor_svc.startup.grammars import Grammars
from executor_svc.startup.speculation import Draft
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.worker import Launched
from tests.executor_svc.driver import Model, spoil
from tests.helpers.executor.group_plans import in_groups, spoil_given_back
from tests.helpers.executor.plans import plan

BLOCK_SIZE = 8
BLOCKS_PER_SLOT = 16


class Stepper:
    """Steps of a model with a cache of its own, full of NaN at first; slot s may use the blocks of `blocks(s)`."""

    def __init__(
        self,
        model: Model,
        num_slots: int = 8,
        max_drafts: int = 0,
        drafts: Callable[[Limits], DraftSource] | None = None,
        draft: Draft | None = None,
        adapters: ModelAdapterLoader | None = None,
        grammars: Grammars | None = None,
        kv_groups: bool = False,
        more_states: int = 0,
        **limits_of_test: int,
    ) -> None:
        """drafts: makes the source of drafts. draft: makes them on a GPU. adapters and grammars: of the model.
        kv_groups: layers with windows are in groups of their own; plans are written as for one group. more_states:
        beside one for each slot, of a model with recurrent states. limits_of_test: fields of Limits in place of the
        usual ones.
        """
        options = {
            **model.options, "block_size": BLOCK_SIZE, "num_gpu_blocks": num_slots * BLOCKS_PER_SLOT,
            "disable_hybrid_kv_cache_manager": not kv_groups, "max_num_seqs": num_slots + more_states,
        }  # fmt: skip
        config = ExecutorConfig(**options)
        self.pools = pools = model.device.new_kv_cache(
            model.loaded.geometry, config, 0, None if draft is None else draft.layers
        )
        spoil(pools)
        vocab = model.loaded.geometry.vocab_size
        limits = Limits(
            num_slots=num_slots,
            max_num_seqs=num_slots,
            max_num_batched_tokens=256,
            max_model_len=BLOCK_SIZE * BLOCKS_PER_SLOT,
            vocab_size=vocab,
            max_logprobs=vocab,
            block_size=BLOCK_SIZE,
            num_device_blocks=pools.num_device_blocks,
            num_host_blocks=pools.num_host_blocks,
            max_inflight_plans=1,
            max_drafts=max_drafts,
            kv_groups=pools.kv_groups,
            pages_per_state=pools.pages_per_state,
        )
        limits = with_adapters(replace(limits, **limits_of_test), adapters)
        limits = limits if grammars is None else grammars.within(limits)
        self.executor = make_executor(
            model.loaded, model.device, pools, limits, enforce_eager=config.enforce_eager,
            drafts=lambda _: None if drafts is None else drafts(limits),
            draft_model=None if draft is None else draft.model, adapters=adapters,
            grammars=None if grammars is None else grammars.of_slots(limits),
        )  # fmt: skip
        self._step_id = 0
        self._first_state = pools.num_device_blocks - (num_slots + more_states) * pools.pages_per_state

    @staticmethod
    def blocks(slot: int) -> list[int]:
        return list(range(slot * BLOCKS_PER_SLOT, (slot + 1) * BLOCKS_PER_SLOT))

    def pages(self, blocks: list[int]) -> list[int]:
        """Pages of blocks, for moves of a model with recurrent states."""
        tables = self.executor.limits.num_tables
        return [block * tables + table for block in blocks for table in range(tables)]

    def state(self, index: int) -> list[int]:
        """Pages of a recurrent state, behind all blocks: one for each slot, and those that the test has added."""
        pages = self.executor.limits.pages_per_state
        return list(range(self._first_state + index * pages, self._first_state + (index + 1) * pages))

    def launch(self, **fields: Any) -> Launched:
        """Begin a step; fields: as of `plan`. What lies before windows is NaN once it is enqueued."""
        launched = self.executor.launch(in_groups(plan(**fields), self.executor.limits), 0)
        if self.executor.limits.kv_groups:
            spoil_given_back(self.executor.slots, self.pools)  # type: ignore[attr-defined]
        return launched

    def step(self, **fields: Any) -> StepResult:
        self._step_id += 1
        result = self.launch(step_id=self._step_id, **fields).result()
        assert result.status == StepStatus.OK
        return result
