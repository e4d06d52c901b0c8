"""The core over the executor of a GPU, and a short load for it. For tests only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from cadenza.v1 import types_pb2
from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import Grammar, SequenceSampling
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.executors import make_executor
from executor_svc.startup.grammars import find_grammars
from executor_svc.startup.speculation import Draft, make_draft_source
from executor_svc.worker.step import Runner, StepExecutor
from scheduler_svc.core.types import BeamSpec
from tests.executor_svc.driver import Model
from tests.golden.invariance import chat, text, with_fields
from tests.helpers.core.core_chats import Chat, Setting
from tests.helpers.core.core_model import Rig
from tests.helpers.core.core_sampling import core_sampling


class _Executing:
    """A GPU's executor, plan by plan; is_late: of a step and a slot with a grammar, whether its mask is."""

    def __init__(self, executor: GpuStepExecutor, is_late: Callable[[int, int], bool]) -> None:
        self._executor, self.slots, self._is_late = executor, executor.slots, is_late

    def execute(self, plan: StepPlan, received_ns: int) -> StepResult:
        if self._executor.grammars is not None:
            self._executor.grammars.recorded = partial(self._is_late, plan.step_id)
        return self._executor.launch(plan, received_ns).result()

    def clear(self) -> None:
        self._executor.clear()


class GpuRig(Rig):
    """As `Rig`, over the executor of a GPU, without graphs."""

    def __init__(
        self, model: Model, setting: Setting, drafts: DraftSource | None = None, *, draft_model: Draft | None = None,
        speculative: str | None = None, adapters: Mapping[int, Path] | None = None, with_grammars: bool = False,
        late_every: int = 0,
    ) -> None:  # fmt: skip
        """draft_model: a model or head that drafts on the GPU. speculative: the source of this option. with_grammars:
        the executor follows them; late_every: one row of so many with a grammar has a late mask."""
        self._grammars, self._late_every = find_grammars(model.loaded) if with_grammars else None, late_every
        self.num_late = 0
        """Rows whose masks were late."""
        super().__init__(model, setting, drafts, draft_model, speculative, adapters, grammar_engine=self.grammar_engine)

    @property
    def grammar_engine(self) -> bytes:
        """What grammars of its requests must have been checked with; empty: it follows none."""
        return b"" if self._grammars is None else self._grammars.engine.key

    def _is_late(self, step_id: int, slot: int) -> bool:
        is_late = bool(self._late_every) and (step_id + slot) % self._late_every == 0
        self.num_late += is_late
        return is_late

    def _source_of(self, runner: Runner | None) -> DraftSource | None:
        if self._speculative is None:
            return self._drafts
        kind = self._config.model_copy(update={"speculative": self._speculative})
        return make_draft_source(kind, self._limits, None, self._model.device, self.pools, runner)

    def _start(self) -> StepExecutor:
        limits = self._limits if self._grammars is None else self._grammars.within(self._limits)
        made = make_executor(
            self._model.loaded, self._model.device, self.pools, limits, enforce_eager=True,
            drafts=self._source_of, draft_model=None if self._draft_model is None else self._draft_model.model,
            adapters=None if self.adapters is None else self.adapters.loader,
            grammars=None if self._grammars is None else self._grammars.of_slots(limits, "cuda"),
        )  # fmt: skip
        assert isinstance(made, GpuStepExecutor)
        return cast("StepExecutor", _Executing(made, self._is_late))


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


def constrained_load(engine: bytes) -> list[Chat]:
    """Greedy, drawn and two samples with grammars, checked with this engine, and a free one beside them."""
    letters, number = (
        Grammar(types_pb2.GrammarSpec(regex=each).SerializeToString(), engine)
        for each in ("[ab]{8,20}", "-?[0-9]{8,20}")
    )
    chats = [
        chat("letters", text(37), with_fields(SequenceSampling(), num_logprobs=2, grammar=letters)),
        chat("number", text(7), with_fields(_SCORED, top_p=0.9, grammar=number)),
        chat("two", text(16), with_fields(_SCORED, grammar=number), num_samples=2),
        chat("free", text(29), with_fields(_SCORED, num_prompt_logprobs=1)),
    ]
    return [replace(each, spec=replace(each.spec, **_FEW)) for each in chats]
