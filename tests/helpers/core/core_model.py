"""The core over the real executor of a model, in one process, moved on step by step. For tests only.

Plans and results go through the wire's own conversions. Time is counted, not taken, so the same requests give the same
plans in every run. KV that nobody has computed is NaN: whoever reads it fails.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from cadenza_common.plan.plan import StepPlan
from cadenza_common.plan.result import StepResult, StepTimings
from cadenza_common.plan_wire.reading import plan_from_wire
from cadenza_common.plan_wire.results import result_from_wire, result_to_wire
from cadenza_common.plan_wire.writing import plan_to_wire
from executor_svc.config import ExecutorConfig
from executor_svc.cpu.runner import ModelRunner
from executor_svc.plan.description import limits_of
from executor_svc.plan.limits import Limits
from executor_svc.ranks.drafts import LeaderDrafts
from executor_svc.speculation.drafts import DraftSource
from executor_svc.startup.speculation import Draft, make_draft_source, source_of, state_layers_of
from executor_svc.worker.model_adapters import ModelAdapterLoader
from executor_svc.worker.step import StepExecutor
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.core.memory.paged_pool import PagedPool
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestKey, RequestSpec, SessionEnd
from scheduler_svc.engine.policies_from_options import policies_from_options
from tests.executor_svc.driver import Model
from tests.helpers.core.core_adapters import CoreAdapters
from tests.helpers.core.core_chats import Chat, Outcome, Setting, Told
from tests.helpers.core.deltas import deltas
from tests.helpers.executor.rank_threads import RankModel, RankThreads

_STEP_S = 0.01
_MAX_CUTS = 40
_CHECKED_EVERY = 3
"""Steps: what a check finds stays wrong, and it costs as much as the core does in a step."""
_EPOCH = 1


class Rig:
    """One lane of the core, its executor, and the plans in flight between them."""

    def __init__(
        self,
        model: Model | RankModel,
        setting: Setting,
        drafts: DraftSource | None = None,
        draft_model: Draft | None = None,
        speculative: str | None = None,
        adapters: Mapping[int, Path] | None = None,
        ranks: RankThreads | None = None,
        grammar_engine: bytes = b"",
    ) -> None:
        """drafts: a source without a model; draft_model: a source with one. speculative: the source of this option.

        adapters: folders by index, for a model that has places. ranks: of which `model` is the first one's part.
        grammar_engine: what makes masks of the executor, if anything does.
        """
        self._config, geometry = _config(model, setting), model.loaded.geometry
        self.setting = setting
        self.happened: Counter[str] = Counter()
        """How often what a setting may ask for did happen."""
        self.outcome: Outcome = {}
        self.pools = model.device.new_kv_cache(
            model.loaded.own_geometry, self._config, draft=None if draft_model is None else draft_model.layers
        )
        loras = {"max_loras": setting.max_loras, "max_cpu_loras": setting.max_cpu_loras}
        limits = limits_of(self._config, geometry, self.pools)
        self._limits = replace(limits, max_drafts=setting.max_drafts, **loras)
        self.core = Scheduler(policies_from_options(SchedulerConfig(**setting.options)))
        self.core.add_executor(0, replace(_spec(self._limits), grammar_engine=grammar_engine))
        places = model.loaded.adapters
        self.adapters = None
        if adapters:
            assert places is not None
            most = setting.max_cpu_loras
            self.adapters = CoreAdapters(
                self.core,
                adapters,
                lambda: ModelAdapterLoader(places, most) if ranks is None else ranks.new_loader(most),
            )

        self._model, self._ranks = model, ranks
        self._drafts, self._draft_model, self._speculative = drafts, draft_model, speculative
        self.executor = self._start()
        self._plans: deque[StepPlan] = deque()
        self._unused: deque[set[int]] = deque()
        """With several KV groups: the pages that nobody holds before and after each of these plans is made."""
        self._chats: dict[str, Chat] = {}
        self._doomed: deque[RequestKey] = deque()
        self._rng = random.Random(3)
        self._now = 0.0
        self._num_applied = 0
        self._forget_memory()

    def _start(self) -> StepExecutor:
        """Return an executor with the rig's pools, whose slots are empty."""
        model, limits, source = self._model, self._limits, self._drafts
        layers = state_layers_of(self._draft_model)
        runner = ModelRunner(
            model.loaded.model, model.device, self.pools, limits, state_layers=layers, adapters=model.loaded.adapters
        )
        if self._speculative is not None:
            kind = self._config.model_copy(update={"speculative": self._speculative})
            source = make_draft_source(kind, limits, self._draft_model, model.device, self.pools, runner)
        elif self._draft_model is not None:
            source = source_of(self._draft_model, limits, model.device, self.pools, runner)
        loader = None if self.adapters is None else self.adapters.loader
        if self._ranks is None:
            return StepExecutor(runner, self.pools, limits, drafts=source, adapters=loader)
        draft = self._draft_model
        leader = self._ranks.start(self._config, limits, None if draft is None else draft.layers)
        shared = None if source is None else LeaderDrafts(source, leader)
        return StepExecutor(runner, self.pools, limits, drafts=shared, adapters=loader, ranks=leader)

    def run(self, chats: Iterable[Chat]) -> Outcome:
        """Let all of them come, and go on until all is reported and nothing is held."""
        for coming in self._arrivals(list(chats)):
            for chat in coming:
                self._add(chat)
            self._step()
        while self.core.groups or self._plans:
            self._step()
        self._step()
        blocks = self.core.lanes[0].blocks
        assert blocks.num_free == self.pools.num_device_blocks
        assert blocks.num_used_host == 0
        assert not self.executor.slots.admitted.any()
        self.happened["hits"] += blocks.prefix_counts.num_hits
        self.happened["drafts"] += sum(self.core.lanes[0].counts.drafts.accepted)
        return self.outcome

    def _arrivals(self, chats: list[Chat]) -> Iterator[list[Chat]]:
        """Who comes before each step."""
        rng, arrivals = self._rng, self.setting.arrivals
        everyone = list(chats)
        if arrivals in ("shuffled", "scattered"):
            rng.shuffle(chats)
        if arrivals in ("together", "shuffled"):
            yield chats
            chats = []
        while chats or self.core.groups.keys() - set(self._doomed):
            count = not self.core.groups if arrivals == "alone" else rng.choice([0, 0, 0, 1, 1, 3])
            yield chats[:count]
            del chats[:count]
            if self.setting.aborts and rng.random() < 0.3:
                self._disturb(rng.choice(everyone).spec)

    def _add(self, chat: Chat) -> None:
        self._chats[chat.spec.request_id] = chat
        self.core.add_request(chat.spec, self._now)
        self.core.drain(False)
        for index in range(chat.spec.num_samples):
            self.outcome[chat.spec.request_id, index] = Told()

    def _disturb(self, spec: RequestSpec) -> None:
        """One like this comes, and another before it is aborted."""
        doomed = replace(spec, request_id=f"doomed at {self._num_applied} of {spec.tenant}")
        if doomed.key not in self.core.groups:
            self._add(Chat(doomed))
            self._doomed.append(doomed.key)
        if len(self._doomed) > 2:
            self._take(self.core.abort(self._doomed.popleft(), FinishDetail.ABORTED))

    def _step(self) -> None:
        """Plan as far ahead as may be, then let the oldest plan run."""
        self._now += _STEP_S
        if self.adapters is not None:
            self.adapters.step(self._settle)
        while len(self._plans) < self.setting.depth and self._plan():
            pass
        if self._plans:
            self._apply()
        elif (wakes_at := self.core.wakes_at(0, self._now)) is not None:
            self._now = wakes_at
        elif self.core.groups:
            self.core.drain(True)  # A static batch would wait for more.

    def _settle(self) -> None:
        while self._plans:
            self._apply()

    def _plan(self) -> bool:
        pool = self.core.lanes[0].blocks.pool
        unused = {*pool.unused_pages} if isinstance(pool, PagedPool) else set()
        plan = self.core.plan_step(0, self._now)
        self._take(self.core.take_outputs())
        if plan is None:
            return False
        self._plans.append(plan)
        if isinstance(pool, PagedPool):
            self._unused.append((unused & {*pool.unused_pages}) - _named_pages(plan))
        step = self.core.lanes[0].inflight[-1]
        swapped = set(step.swapped_out)
        self.happened.update(f"{'swap' if one in swapped else 'recompute'} {_kind(one)}" for one in step.preempted)
        self.happened["host hits"] += bool(plan.swap_in and not step.swapped_in)
        return True

    def _apply(self) -> None:
        plan = self._plans.popleft()
        if self._unused:
            # What was given back before this plan was made: the plans before it were the last that read it.
            self.pools.pool[list(self._unused.popleft())] = 0xFF
        made = self.executor.execute(plan_from_wire(plan_to_wire(plan, _EPOCH)), received_ns=0)
        result = result_from_wire(result_to_wire(made, _EPOCH, incarnation=1))
        assert not result.error_slots
        self._take(self.core.apply_result(0, _modelled(plan, result), self._now)[1])
        self._num_applied += 1
        if self._num_applied % _CHECKED_EVERY == 0:
            self.core.check_integrity()
        if self.setting.loses_every and self._num_applied % self.setting.loses_every == 0:
            self._plans.clear()
            self._unused.clear()
            self._lose_memory()
            self._take(self.core.executor_lost(0, self._now))
            if self.adapters is not None:
                self.adapters.open_session(same=False)
        cuts_every = self.setting.cuts_every
        # Not for ever: a prompt with logprobs begins anew after each cut.
        if cuts_every and self._num_applied % cuts_every == 0 and self._num_applied < _MAX_CUTS * cuts_every:
            self._cut_session()

    def _cut_session(self) -> None:
        """The plans in flight ran in part: whoever reads what they were to write fails."""
        pools = [_once(view) for view in (*self.pools.layers, *self.pools.layout.views(self.pools.host))]
        before = [layer.clone() for layer in pools]
        slots = self.executor.slots
        states = {*slots.states.tables[slots.admitted].flatten().tolist()}
        states |= {page for saves in slots.states.armed.values() for save in saves for page in save.pages.tolist()}
        former = self.pools.pool.clone()
        while len(self._plans) < self.setting.depth and self._plan():
            pass
        for plan in self._plans:
            self.executor.execute(plan_from_wire(plan_to_wire(plan, _EPOCH)), received_ns=0)
            states |= {page for sequence in plan.admitted for page in sequence.state_pages}
            states |= {*plan.state_saves.page_ids}
        spoilt = [page for page in states if (self.pools.pool[page] != former[page]).any()]
        for layer, old in zip(pools, before, strict=True):
            layer[(layer != old) & ~(layer.isnan() & old.isnan())] = float("nan")
        self.pools.pool[spoilt] = 0xFF
        self._plans.clear()
        self._unused.clear()
        self.executor.clear()
        self._take(self.core.executor_lost(0, self._now, SessionEnd()))
        self.core.check_integrity()
        if self.adapters is None:
            self._take(self.core.session_opened(0, same_incarnation=True, keeps_kv=True))
        else:
            self.adapters.open_session(same=True)
        self.core.check_integrity()
        self.happened["kept sessions"] += bool(len(self.core.lanes[0].running))

    def _lose_memory(self) -> None:
        """Whoever reads what was not computed since then fails."""
        if self.adapters is not None:
            self.adapters.restart()
        self.executor = self._start()
        self._forget_memory()

    def _forget_memory(self) -> None:
        for layer in (*self.pools.layers, *self.pools.draft_layers, *self.pools.layout.views(self.pools.host)):
            layer.fill_(float("nan"))
        if self.pools.pages_per_state:
            self.pools.pool.fill_(0xFF)
            self.pools.host.fill_(0xFF)

    def _take(self, outputs: StepOutputs) -> None:
        for delta in deltas(outputs):
            self.outcome[delta.key[1], delta.sample_index].add(delta)
            if delta.finish is not None:
                self._talk_on(delta.key[1])

    def _talk_on(self, request_id: str) -> None:
        """With all its samples reported, a chat goes on from the first."""
        chat = self._chats[request_id]
        every = [self.outcome[request_id, index] for index in range(chat.spec.num_samples)]
        if chat.says and all(sample.finish for sample in every):
            self._add(chat.turn(every[0].token_ids))


def _once(view: Tensor) -> Tensor:
    """A layer's memory; of latents, whose keys are values too, the keys."""
    return view if view.stride(1) else view[:, :1]


def _kind(sequence: Sequence) -> str:
    return "beams" if sequence.is_beam else "samples" if len(sequence.group.sequences) > 1 else "one"


def _config(model: Model | RankModel, setting: Setting) -> ExecutorConfig:
    sizes: dict[str, Any] = {
        "block_size": setting.block_size,
        "num_gpu_blocks": setting.num_blocks,
        "num_cpu_blocks": setting.num_host_blocks,
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
    }
    if setting.max_drafts:  # the tail of recurrent states holds as many
        sizes |= {"speculative": "ngram", "num_speculative_tokens": setting.max_drafts}
    return ExecutorConfig(**{**model.options, **sizes})


def _spec(limits: Limits) -> ExecutorSpec:
    return ExecutorSpec(
        block_size=limits.block_size,
        num_blocks=limits.num_device_blocks,
        num_slots=limits.num_slots,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_host_blocks=limits.num_host_blocks,
        max_drafts=limits.max_drafts,
        max_loras=limits.max_loras,
        max_cpu_loras=limits.max_cpu_loras,
        kv_groups=tuple(
            KVGroup(index, group.window or None, group.pages_per_block) for index, group in enumerate(limits.kv_groups)
        ),
        pages_per_state=limits.pages_per_state,
    )


def _named_pages(plan: StepPlan) -> set[int]:
    """Pages that a plan names: a sequence may get and give them up in one."""
    columns = [plan.append_block_ids, *(appends.page_ids for appends in plan.group_appends)]
    columns += [ids for moves in (plan.swap_out, plan.copies) for ids in (moves.sources, moves.destinations)]
    columns += [plan.swap_in.destinations, *(sequence.block_ids for sequence in plan.admitted)]
    columns += [table.page_ids for sequence in plan.admitted for table in sequence.group_tables]
    columns += [plan.state_saves.page_ids, *(sequence.state_pages for sequence in plan.admitted)]
    return {page for column in columns for page in column}


def _modelled(plan: StepPlan, result: StepResult) -> StepResult:
    """Times by a model: moving blocks costs less than computing in 24 steps, and more in the next 24."""
    num_tokens = sum(plan.scheduled_num_tokens) + len(result.slots)
    num_moves = len(plan.swap_out) + len(plan.swap_in)
    return replace(
        result,
        timings=StepTimings(device_ns=num_tokens * (1 if plan.step_id // 24 % 2 else 1000), moves_ns=2000 * num_moves),
    )
