"""Runs the core's plans without numpy: slots as execution.proto means them, over pools that know what each block holds.

It gives the tokens of the simulated executor (executor_svc/simulated), some ten times as fast on batches this small,
and a test holds the two against each other. The pools hold an identity of all tokens up to a position in place of its
keys and values: a slot that reads another sequence's KV, or none, is noticed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cadenza_common.plan.plan import AdmittedSequence, GroupTable, StepPlan
from cadenza_common.plan.result import Candidates, LogprobColumns, SlotError, StepResult, TokenLogprobs
from scheduler_svc.core.kv_groups import KVGroup
from scheduler_svc.plan_loop.ports import ModelDescription
from tests.simulation.executor.drafting import (
    NO_DRAFTS,
    DraftPlan,
    in_order,
    make_drafts,
    num_allowed,
    rows_left,
    take_drafts,
)
from tests.simulation.executor.pools import KnownPools, PlanError, require
from tests.simulation.executor.slot import Slot
from tests.simulation.executor.states import KnownStates

_ROOT = 7


class TokenSource(Protocol):
    """Tokens as a pure function of a sequence's tokens and its sampling; see known_tokens."""

    def next_token(self, slot: Slot) -> int | None:
        """The token after the slot's tokens; None if none is allowed."""

    def draft(self, slot: Slot) -> tuple[int, int]:
        """A guess of the token after the slot's tokens, and how hard it is, 0 to RESOLUTION - 1."""

    def token_logprobs(self, slot: Slot, token_id: int) -> TokenLogprobs:
        """Logprobs of that token."""

    def candidates(self, slot: Slot) -> Candidates:
        """The best next tokens."""

    def prompt_logprobs(self, slot: Slot, start: int, end: int) -> LogprobColumns:
        """Those of the prompt tokens `start` to `end - 1`."""


@dataclass(slots=True)
class _Work:
    slot: Slot
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    """Behind its tokens: the last of the slot's, while the step runs."""

    @property
    def num_computed(self) -> int:
        return self.num_tokens + self.num_drafts


class PlanRunner:
    """The slots and pools of one process. `clear` frees the slots; KV stays."""

    def __init__(self, model: ModelDescription, source: TokenSource, drafts: DraftPlan = NO_DRAFTS) -> None:
        self.model = model
        self._source = source
        self._drafts = drafts
        self._groups = model.kv_groups or (KVGroup(0),)
        self._pools = KnownPools(model, self._groups)
        self._states = KnownStates(model)
        self.slots: dict[int, Slot] = {}
        self.adapters: dict[int, int] = {}
        """The loaded adapters: content by index."""
        self.computed_seeds: frozenset[int] = frozenset()

    @property
    def num_slots_used(self) -> int:
        """Slots that hold a sequence."""
        return len(self.slots)

    def clear(self) -> None:
        """Free all slots."""
        self.slots.clear()
        self._states.clear()

    def load_adapter(self, index: int, content: int) -> None:
        """Later plans may name an adapter."""
        self.adapters[index] = content

    def unload_adapter(self, index: int) -> None:
        """No later plan names an adapter."""
        del self.adapters[index]

    def run(self, plan: StepPlan, non_finite: int | None = None) -> StepResult:
        """Run one plan; raises PlanError. The logits of the non_finite-th sampling slot are not finite."""
        work, forks, idle = self._prepare(plan)
        self.computed_seeds = frozenset(each.slot.sampling.seed for each in work)
        prompt_logprobs = {}
        for each in work:
            self._states.step(each.slot, each.num_computed)
            self._states.spoil_pages(self._pools.write(each.slot, each.num_computed))
            self._add_prompt_logprobs(prompt_logprobs, each)
        for each in work:
            self._pools.check(each.slot, each.slot.num_computed, each.slot.num_computed + each.num_computed)
            content = self.adapters.get(each.slot.adapter_index, 0)
            require(content == each.slot.content, f"slot {each.slot.number} computes without its adapter")
        drafts = {each.slot: take_drafts(each.slot, each.num_drafts) for each in work}
        sampling = [each.slot for each in work if each.samples] + [fork for fork, _ in forks]
        sampling.sort(key=lambda slot: slot.number)
        for each in work:
            each.slot.num_computed += each.num_tokens
        for fork, source in forks:
            fork.num_computed = source.num_computed
        result = self._sample(plan, sampling, idle, non_finite, drafts)
        result.saved_slots = [slot for slot, _ in self._states.saved]
        result.saved_positions = [position for _, position in self._states.saved]
        result.prompt_logprobs.update(prompt_logprobs)
        if self.model.adaptive_drafts:
            total_ns = 100_000 + self._drafts.row_ns * sum(each.num_computed for each in work)
            result.timings = replace(result.timings, total_ns=total_ns)
        return result

    def spoil(self, plan: StepPlan) -> None:
        """Fail in the middle of a plan: what it would have written is neither the old nor the new content."""
        work, _, _ = self._prepare(plan)
        self._pools.spoil_moves(plan)
        self._states.spoil((each.slot for each in work), plan)
        for each in work:
            self._pools.spoil(each.slot, each.num_computed)

    def spoil_pages(self, pages: list[int]) -> None:
        """Leave garbage in device pages."""
        self._pools.spoil_pages(pages)
        self._states.spoil_pages(pages)

    # --- the plan's parts, in the order of execution.proto -----------------------------------------------------------

    def _prepare(self, plan: StepPlan) -> tuple[list[_Work], list[tuple[Slot, Slot]], list[Slot]]:
        """Apply a plan up to its compute; returns the slots that compute, the forks, and the slots that stopped."""
        for number in plan.released_slots:
            require(number in self.slots, f"released slot {number} is not admitted")
            del self.slots[number]
        for admitted in plan.admitted:
            self._admit(admitted)
        if any(admitted.adapter_index for admitted in plan.admitted):
            count = len({slot.adapter_index for slot in self.slots.values()} - {0})
            require(count <= self.model.max_loras, f"slots have {count} adapters, over {self.model.max_loras}")
        self._append(0, plan.append_slots, plan.append_block_ids)
        for appends in plan.group_appends:
            self._append(appends.kv_group, appends.slots, appends.page_ids)
        for number in plan.held_slots:
            self._slot(number).held = True
        for number in plan.resumed_slots:
            self._slot(number).held = False
        for number, token_id in zip(plan.given_slots, plan.given_token_ids, strict=True):
            require(self._slot(number).num_left == 0, f"slot {number} is given a token before it has computed its own")
            self._slot(number).append(token_id)
        self._pools.move(plan)
        self._states.prepare(plan, self.slots)
        return self._schedule(plan)

    def _append(self, group: int, slots: Sequence[int], pages: Sequence[int]) -> None:
        size = self._groups[group].pages_per_block
        for first in range(0, len(slots), size):
            require(len({*slots[first : first + size]}) == 1, f"slot {slots[first]}: not all pages of a block")
            self._slot(slots[first]).tables[group] += self._blocks(group, pages[first : first + size])

    def _blocks(self, group: int, pages: Sequence[int]) -> list[tuple[int, ...]]:
        size = self._groups[group].pages_per_block
        require(len(pages) % size == 0, f"{len(pages)} pages in KV group {group}")
        require(all(0 <= page < self.model.num_device_blocks for page in pages), "a page is not in the pool")
        return [tuple(pages[first : first + size]) for first in range(0, len(pages), size)]

    def _tables(self, admitted: AdmittedSequence) -> list[list[tuple[int, ...]]]:
        first = GroupTable(0, admitted.first_block, admitted.block_ids)
        tables: list[list[tuple[int, ...]]] = [[] for _ in self._groups]
        for table in (first, *admitted.group_tables):
            tables[table.kv_group] = [()] * table.first_block + self._blocks(table.kv_group, table.page_ids)
        return tables

    def _admit(self, admitted: AdmittedSequence) -> None:
        model, number = self.model, admitted.slot
        require(0 <= number < model.num_slots and number not in self.slots, f"slot {number} is not free")
        tokens, tables = list(admitted.token_ids), self._tables(admitted)
        if (source := admitted.source) is not None:
            of = self._slot(source.slot)
            require(source.num_tokens <= of.num_prompt, f"slot {number}: output of its source")
            num_blocks = source.num_blocks // self._groups[0].pages_per_block
            require(tables[0][:num_blocks] == of.tables[0][:num_blocks], f"slot {number}: other blocks")
            require(admitted.adapter_index == of.adapter_index, f"slot {number} has another adapter than its source")
            tokens = of.tokens[: source.num_tokens] + tokens
        require(1 <= admitted.num_prompt_tokens <= len(tokens) <= model.max_model_len, f"slot {number}: bad length")
        require(admitted.num_computed_tokens < len(tokens), f"slot {number} has nothing to compute")
        require(admitted.max_drafts <= model.max_drafts, f"slot {number}: {admitted.max_drafts} drafts")
        require(not (admitted.max_drafts and admitted.sampling.num_candidates), f"slot {number}: drafts of a beam")
        content = self.adapters.get(admitted.adapter_index, 0)
        require(
            content > 0 or not admitted.adapter_index, f"slot {number}: adapter {admitted.adapter_index} is not loaded"
        )
        # Equal contents give equal KV, whatever their names.
        kv, last = [], hash((_ROOT, content)) if content else _ROOT
        for token_id in tokens:
            last = hash((last, token_id))
            kv.append(last)
        self.slots[number] = Slot(
            number,
            tokens,
            kv,
            admitted.num_prompt_tokens,
            admitted.num_computed_tokens,
            admitted.sampling,
            admitted.sample_index,
            admitted.held,
            admitted.adapter_index,
            content,
            admitted.max_drafts,
            admitted.max_len,
            tables=tables,
            state_pages=tuple(admitted.state_pages),
        )

    def _schedule(self, plan: StepPlan) -> tuple[list[_Work], list[tuple[Slot, Slot]], list[Slot]]:
        forked, idle = set(plan.fork_slots), []
        named = dict(
            zip(
                plan.scheduled_slots,
                zip(plan.scheduled_num_tokens, plan.scheduled_samples, strict=True),
                strict=True,
            )
        )
        work: list[_Work] = []
        for number, (num_tokens, samples) in named.items():
            slot = self._slot(number)
            if slot.stopped:
                idle += [slot] if samples else []
                continue
            require(0 < num_tokens <= slot.num_left, f"slot {number} computes {num_tokens} of {slot.num_left} tokens")
            require(not samples or num_tokens == slot.num_left, f"slot {number} samples too early")
            work.append(_Work(slot, num_tokens, samples))
        if plan.decode_ready:
            for number, slot in self.slots.items():
                ready = slot.num_left == 1 and not (slot.held or slot.stopped)
                if ready and number not in named and number not in forked:
                    work.append(_Work(slot, 1, True))
        forks = self._forks(plan, work, idle)
        model = self.model
        require(len(work) <= model.max_num_seqs, f"{len(work)} sequences in a step of {model.max_num_seqs}")
        num_sampling = sum(each.samples for each in work) + len(forks)
        require(num_sampling <= model.max_num_seqs, f"{num_sampling} slots sample")
        num_tokens = sum(each.num_tokens for each in work)
        require(num_tokens <= model.max_num_batched_tokens, f"{num_tokens} tokens in a step")
        if plan.max_drafts:
            self._draft(plan, work, rows_left(model, num_sampling, num_tokens))
        return work, forks, idle

    def _draft(self, plan: StepPlan, work: list[_Work], num_left: int) -> None:
        """Let the slots that decode have drafts behind their tokens."""
        model = self.model
        require(plan.max_drafts <= model.max_drafts, f"{plan.max_drafts} drafts")
        for each in sorted(work, key=lambda each: each.slot.number):
            count = num_allowed(model, plan, each.slot)
            num_left -= count
            require(num_left >= 0, "the plan leaves no rows for the drafts that it allows")
            each.num_drafts = make_drafts(
                each.slot, count, self._drafts.acceptance, self._source.draft, model.vocab_size
            )

    def _forks(self, plan: StepPlan, work: list[_Work], idle: list[Slot]) -> list[tuple[Slot, Slot]]:
        sampling = {each.slot.number: each.slot for each in work if each.samples}
        forks = []
        for number, source_number in zip(plan.fork_slots, plan.fork_source_slots, strict=True):
            fork, source = self._slot(number), self._slot(source_number)
            if source.stopped:
                fork.stopped = True
                idle.append(fork)
                continue
            require(source_number in sampling, f"the source {source_number} of a fork does not sample")
            require(fork.tokens == source.tokens, f"fork {number} has other tokens than its source")
            forks.append((fork, source))
        return forks

    # --- compute -----------------------------------------------------------------------------------------------------

    def _sample(
        self,
        plan: StepPlan,
        sampling: list[Slot],
        idle: list[Slot],
        non_finite: int | None,
        drafts: dict[Slot, list[int]],
    ) -> StepResult:
        token_ids: dict[int, list[int]] = {slot.number: [] for slot in idle}
        errors: dict[int, SlotError] = {}
        logprobs: dict[int, LogprobColumns] = {}
        candidates: dict[int, Candidates] = {}
        for index, slot in enumerate(sampling):
            number = slot.number
            token_ids[number] = []
            if index == non_finite:
                errors[number], slot.stopped = SlotError.NON_FINITE_LOGITS, True
                continue
            if slot.sampling.num_candidates:
                candidates[number] = self._source.candidates(slot)
                if not candidates[number].token_ids:
                    del candidates[number]
                    errors[number], slot.stopped = SlotError.NO_ALLOWED_TOKEN, True
                continue
            token_ids[number], of_tokens = self._next_tokens(slot, drafts.get(slot, []))
            if not token_ids[number]:
                errors[number], slot.stopped = SlotError.NO_ALLOWED_TOKEN, True
            elif of_tokens:
                logprobs[number] = columns_of(of_tokens)
        slots = sorted(token_ids)
        counts = [len(token_ids[number]) for number in slots]
        return StepResult(
            plan.step_id,
            slots=slots,
            num_tokens=[] if all(count == 1 for count in counts) else counts,
            token_ids=[token_id for number in slots for token_id in token_ids[number]],
            num_drafts=in_order({slot.number: len(drafts.get(slot, [])) for slot in sampling}, slots),
            num_accepted=[max(0, count - 1) for count in counts] if any(drafts.values()) else (),
            error_slots=sorted(errors),
            errors=[errors[number] for number in sorted(errors)],
            logprobs=logprobs,
            candidates=candidates,
        )

    def _next_tokens(self, slot: Slot, drafts: list[int]) -> tuple[list[int], tuple[TokenLogprobs, ...]]:
        """Give a slot its next token, and one after each draft that was right; none if none is allowed."""
        token_ids, logprobs = [], []
        for draft in (*drafts, None):
            token_id = self._source.next_token(slot)
            if token_id is None:
                break  # Behind a draft: the slot fails once this row is its first.
            if slot.sampling.num_logprobs is not None:
                logprobs.append(self._source.token_logprobs(slot, token_id))
            slot.num_computed += bool(token_ids)
            token_ids.append(token_id)
            slot.append(token_id)
            slot.stopped = slot.ends_with(token_id)
            if slot.stopped or token_id != draft:
                break
        return token_ids, tuple(logprobs)

    def _add_prompt_logprobs(self, found: dict[int, LogprobColumns], each: _Work) -> None:
        """Positions a to b - 1 predict the tokens a + 1 to b."""
        slot = each.slot
        if slot.sampling.num_prompt_logprobs is None:
            return
        start, end = slot.num_computed + 1, min(slot.num_computed + each.num_tokens + 1, slot.num_prompt)
        if start < end:
            found[slot.number] = self._source.prompt_logprobs(slot, start, end)

    def _slot(self, number: int) -> Slot:
        slot = self.slots.get(number)
        if slot is None:
            raise PlanError(f"slot {number} is not admitted")
        return slot


def columns_of(tokens: Sequence[TokenLogprobs]) -> LogprobColumns:
    """The same in columns; where they begin is not said, as by the scheduler's reader."""
    return LogprobColumns(
        start=0,
        logprobs=[each.logprob for each in tokens],
        ranks=[each.rank for each in tokens],
        num_top=len(tokens[0].top_token_ids),
        top_token_ids=[token_id for each in tokens for token_id in each.top_token_ids],
        top_logprobs=[logprob for each in tokens for logprob in each.top_logprobs],
    )
