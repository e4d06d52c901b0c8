"""Random histories of plans, run by the host's slots and by the device's, which must agree. For tests only.

The host that plans may be a step behind: it then schedules slots that have stopped in the step before.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cadenza_common.plan.plan import AdmittedSequence, GroupAppends, GroupTable, PrefixSource, StepPlan
from cadenza_common.plan.result import SlotError
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.batch.forward_batch import ForwardBatch, build_batch
from executor_svc.batch.scheduled import Scheduled
from executor_svc.batch.slots import Slots
from executor_svc.gpu.kernels.slots.commit import IDLE
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.slots.device_slots import DeviceSlots, PendingTokens
from executor_svc.gpu.slots.slot_changes import Applied
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import GroupShape, Limits
from tests.helpers.executor.plans import columns, flat, ints, plan, scheduled, sequence

LIMITS = Limits(
    num_slots=9,
    max_num_seqs=9,
    max_num_batched_tokens=400,
    max_model_len=70,
    vocab_size=70,
    max_logprobs=4,
    block_size=4,
    num_device_blocks=500,
    num_host_blocks=0,
    max_inflight_plans=2,
)
MOST = StepSizes(420, 12, 13, 14)


@dataclass(frozen=True)
class ExpectedTokens:
    """The tokens that a step must report to the host."""

    pending: PendingTokens
    token_ids: list[int]
    errors: list[int]
    positions: list[int]

    def check(self) -> None:
        got = self.pending.wait()
        assert got.token_ids.tolist() == self.token_ids
        assert got.errors.tolist() == self.errors
        assert got.positions.tolist() == self.positions
        assert got.idle.tolist() == [error == IDLE for error in self.errors]


class History:
    """Plans, one after the other; `truth` knows all results, `host` what the planner knows."""

    def __init__(
        self,
        device: torch.device,
        seed: int,
        behind: bool,
        staging_words: int = 1 << 12,
        kv_groups: tuple[GroupShape, ...] = (),
    ) -> None:
        self.limits = replace(LIMITS, kv_groups=kv_groups)
        self.rng = np.random.default_rng(seed)
        self.device = device
        self.behind = behind
        self.truth = Slots(self.limits)
        self.host = self.truth
        self.slots = DeviceSlots(self.limits, device, MOST, staging_words)
        self.expected: list[ExpectedTokens] = []
        self.num_idle = 0
        self._spoil()

    def _spoil(self) -> None:
        """Leave in all buffers what no step may show."""
        buffers = self.slots.buffers
        for each in (buffers.by_token, buffers.by_seq, buffers.by_row, buffers.logits_rows, buffers.results):
            each.fill_(-77)
        buffers.taken.fill_(-77)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def below(self, end: int) -> int:
        return int(self.rng.integers(end))

    # ------------------------------------------------------------ a plan that the host finds valid

    def next_plan(self) -> StepPlan:
        """Any plan that suits the host's slots."""
        draft = copy.deepcopy(self.host)
        full = draft.num_tokens > LIMITS.max_model_len - 3
        released = [
            s
            for s in np.flatnonzero(draft.admitted).tolist()
            if full[s] or self.chance(0.15 if self.host.stopped[s] else 0.05)
        ]
        draft.admitted[released] = False
        free = self.rng.permutation(np.flatnonzero(~draft.admitted)).tolist()
        admitted = [self._sequence(slot) for slot in free[: self.below(3)]]
        step = plan(released_slots=ints(*released), admitted=tuple(admitted), decode_ready=self.chance(0.8))
        draft = copy.deepcopy(self.host)
        draft.apply(step)
        live = np.flatnonzero(draft.admitted).tolist()
        held = [s for s in live if self.chance(0.1)]
        resumed = [s for s in live if (draft.held[s] or s in held) and self.chance(0.5)]
        done = draft.num_tokens == draft.num_computed_tokens
        given = [(s, self.below(LIMITS.vocab_size)) for s in live if done[s] and self.chance(0.7)]
        appends, others = self._appends(draft, live, 0), []
        for group in range(1, len(self.limits.groups)):
            pairs = self._appends(draft, live, group)
            if pairs:
                others.append(GroupAppends(group, *map(list, zip(*pairs, strict=True))))
        step = replace(
            step,
            held_slots=ints(*held),
            resumed_slots=ints(*resumed),
            **flat(
                given=columns(*given),
                appends=columns(*appends),
            ),
            group_appends=others,
        )
        draft = copy.deepcopy(self.host)
        draft.apply(step)
        rows = self._explicit(draft, live)
        step = replace(step, **flat(scheduled=scheduled(*rows)))
        return self._with_forks(step, draft.schedule(step), draft)

    def _appends(self, slots: Slots, live: list[int], group: int) -> list[tuple[int, int]]:
        """Pages of new blocks, those of a block together, of slots mixed."""
        owners = [s for s in live for _ in range(self._blocks_short(slots, s, group))]
        size = self.limits.groups[group].pages_per_block
        return [(owners[i], self._block()) for i in self._mixed(owners) for _ in range(size)]

    def _mixed(self, slots: list[int]) -> list[int]:
        """Indices in an order that mixes the slots and keeps that of each."""
        keys = np.argsort(self.rng.random(len(slots)))
        shuffled = [slots[i] for i in keys]
        left = {slot: [i for i, each in enumerate(slots) if each == slot] for slot in set(slots)}
        return [left[slot].pop(0) for slot in shuffled]

    def _block(self) -> int:
        return self.below(LIMITS.num_device_blocks)

    def _blocks_short(self, slots: Slots, slot: int, group: int) -> int:
        """Blocks that the slot needs for its known tokens and a few more, and now and then another."""
        needed = -(-min(int(slots.num_tokens[slot]) + 2, LIMITS.max_model_len) // LIMITS.block_size)
        num_blocks = int(slots.places.num_blocks[group, slot])
        return min(LIMITS.max_blocks_per_seq - num_blocks, max(0, needed - num_blocks) + self.below(2))

    def _sequence(self, slot: int, tokens: IntArray | None = None) -> AdmittedSequence:
        is_fork = tokens is not None
        if tokens is None:
            tokens = self.rng.integers(0, LIMITS.vocab_size, 1 + self.below(40))
        num_tokens = len(tokens)
        computed = num_tokens - 1 if is_fork or self.chance(0.3) else self.below(num_tokens)
        num_blocks = min(LIMITS.max_blocks_per_seq, -(-computed // LIMITS.block_size) + self.below(2))
        some = self.rng.permutation(LIMITS.vocab_size)[: self.below(2) * self.below(20)]
        sampling = SequenceSampling(
            stop_token_ids=some,
            min_tokens=self.below(2) * self.below(5),
            num_candidates=4 if self.chance(0.15) else 0,
        )
        groups = self.limits.groups
        blocks = [self._block() for _ in range(num_blocks * groups[0].pages_per_block)]
        made = sequence(
            slot,
            tokens.tolist(),
            blocks,
            computed,
            prompt=1 + self.below(num_tokens),
            sampling=sampling,
            held=not is_fork and self.chance(0.1),
        )
        tables = []
        for index, group in enumerate(groups[1:], 1):
            first = max(0, computed - group.window) // LIMITS.block_size
            pages = [self._block() for _ in range((num_blocks - first) * group.pages_per_block)]
            tables.append(GroupTable(index, first, pages))
        return replace(made, group_tables=tables)

    def _explicit(self, slots: Slots, live: list[int]) -> list[tuple[int, int, bool]]:
        rows = []
        for slot in live:
            left = int(slots.num_tokens[slot] - slots.num_computed_tokens[slot])
            if slots.stopped[slot]:
                if self.chance(0.5):
                    rows.append((slot, 1 + self.below(3), self.chance(0.7)))
            elif left and not slots.held[slot] and self.chance(0.9 if left > 1 else 0.3):
                count = left if self.chance(0.6) else 1 + self.below(left)
                rows.append((slot, count, count == left and self.chance(0.8)))
        return [rows[i] for i in self.rng.permutation(len(rows))]

    def _with_forks(self, step: StepPlan, planned: Scheduled, slots: Slots) -> StepPlan:
        """Admit a fork of some slot that samples, as the host sees it, or is known to be idle."""
        free = np.flatnonzero(~slots.admitted).tolist()
        sources = [*planned.sampling_slots.tolist(), *planned.idle_slots.tolist()]
        pairs, admitted = [], list(step.admitted)
        for source in sources:
            num_tokens = int(slots.num_tokens[source])
            if free and num_tokens <= LIMITS.max_model_len and self.chance(0.2):
                fork = self._sequence(free[0], slots.token_ids[source, :num_tokens].astype(np.int64))
                admitted.append(self._with_source(fork, step, slots, source) if self.chance(0.7) else fork)
                pairs.append((free.pop(0), source))
        return replace(step, **flat(admitted=admitted, forks=columns(*pairs)))

    def _with_source(self, fork: AdmittedSequence, step: StepPlan, slots: Slots, source: int) -> AdmittedSequence:
        """The same tokens: some of the prompt, and perhaps blocks, from the source's slot."""
        num_tokens = self.below(1 + int(slots.num_prompt_tokens[source]))
        # Blocks that the plan appends come after its admissions.
        size = self.limits.groups[0].pages_per_block
        num_known = int(slots.num_blocks[source]) - list(step.append_slots).count(source) // size
        if self.limits.groups[0].window:
            num_known = 0
        num_blocks = size * self.below(1 + min(num_known, LIMITS.max_blocks_per_seq - len(fork.block_ids) // size))
        return replace(fork, token_ids=fork.token_ids[num_tokens:], source=PrefixSource(source, num_tokens, num_blocks))

    # ------------------------------------------------------------ a step

    def run(self, num_steps: int) -> None:
        """Run random steps and check everything after each."""
        for _ in range(num_steps):
            self.step(self.next_plan())
        self._check_results()

    def step(self, step: StepPlan) -> Applied:
        """Run a plan on the truth and on the device."""
        complete = self.truth.apply(step)
        actual = self.truth.schedule(step)
        planned = actual
        if self.host is not self.truth:
            complete = self.host.apply(step)
            planned = self.host.schedule(step)
        sizes = self._sizes(planned)
        applied = self.slots.apply(complete)
        inputs = self.slots.build(planned, sizes)
        self._check_inputs(inputs, planned, actual)
        if self.behind:
            # The results of the step before are read only now.
            self._check_results()
        self._commit(inputs, planned, actual)
        self._check_state()
        return applied

    def _sizes(self, planned: Scheduled) -> StepSizes:
        num_seqs, num_tokens = len(planned.slots), int(planned.num_tokens.sum())
        num_rows, num_logits = len(planned.sampling_slots), int(planned.samples.sum())
        if num_tokens == num_seqs and num_rows <= MOST.num_seqs and self.chance(0.7):
            return StepSizes.decode(max(num_seqs, num_rows) + self.below(MOST.num_seqs + 1 - max(num_seqs, num_rows)))
        sizes = (num_tokens, num_seqs, num_logits, num_rows)
        limits = (MOST.num_tokens, MOST.num_seqs, MOST.num_logits, MOST.num_rows)
        pairs = zip(sizes, limits, strict=True)
        return StepSizes(*(size + (self.below(min(limit - size, 6) + 1)) for size, limit in pairs))

    def _commit(self, inputs: StepInputs, planned: Scheduled, actual: Scheduled) -> None:
        """Sample anything, now and then with an error, and let all take it."""
        rows, truth = planned.sampling_slots, self.truth
        live = np.isin(rows, actual.sampling_slots)
        tokens = self.rng.integers(0, LIMITS.vocab_size, inputs.sizes.num_rows)
        errors = self.rng.choice([0] * 22 + [1, 4], inputs.sizes.num_rows)
        if self.chance(0.1) and len(actual.slots):
            truth.prompt_failed[actual.slots[0]] = True
            self.slots.state.prompt_failed[int(actual.slots[0])] = 1
        failed = truth.prompt_failed[rows] & (errors[: len(rows)] == 0)
        found = np.where(failed, int(SlotError.NON_FINITE_LOGITS), errors[: len(rows)])
        found = np.where(live, found, IDLE)
        waits = np.isin(rows, actual.sampling_slots[actual.candidates])
        taken = np.where(live & (found == 0) & ~waits, tokens[: len(rows)], -1)
        # Of padding nothing may be read.
        tokens[len(rows) :], errors[len(rows) :] = 2**31 - 1, 3
        tokens[: len(rows)][~live] = 2**31 - 1
        dtype = torch.int64 if self.chance(0.5) else torch.int32
        on_device = [
            torch.from_numpy(tokens).to(self.device, dtype),
            torch.from_numpy(errors).to(self.device, torch.int32),
        ]
        pending = self.slots.commit(planned, inputs.sizes, *on_device)
        positions = np.where(live, truth.num_tokens[rows], 0)
        self.expected.append(ExpectedTokens(pending, taken.tolist(), found.tolist(), positions.tolist()))
        assert inputs.taken.tolist() == [*taken.tolist(), *[-1] * (inputs.sizes.num_rows - len(rows))]
        self.num_idle += int((~live).sum())
        before = copy.deepcopy(truth)
        truth.commit(actual, tokens[: len(rows)][live], found[live] == 0)
        if self.behind:
            # The planner knows what came before this step, and takes it that each of its samples is a token.
            stopped = before.stopped.copy()
            stopped[actual.idle_slots] = True
            before.commit(actual, tokens[: len(rows)][live], np.ones(int(live.sum()), np.bool_))
            before.stopped[:] = stopped
            self.host = before

    # ------------------------------------------------------------ checks

    def _check_results(self) -> None:
        for tokens in self.expected:
            tokens.check()
        self.expected.clear()

    def _check_inputs(self, inputs: StepInputs, planned: Scheduled, actual: Scheduled) -> None:
        got = {name: getattr(inputs, name).cpu().numpy() for name in inputs.__slots__ if name != "sizes"}
        sizes, num_seqs, num_rows = inputs.sizes, len(planned.slots), len(planned.sampling_slots)
        starts, lens = got["query_start_loc"], got["seq_lens"]
        assert starts[: num_seqs + 1].tolist() == [0, *planned.num_tokens.cumsum().tolist()]
        spare = sizes.num_tokens - int(planned.num_tokens.sum())
        assert np.diff(starts[num_seqs:]).tolist() == [int(i < spare) for i in range(sizes.num_seqs - num_seqs)]
        live = np.isin(planned.slots, actual.slots)
        assert planned.slots[live].tolist() == actual.slots.tolist()
        assert not lens[num_seqs:].any()
        assert not lens[:num_seqs][~live].any()
        rows = got["rows"]
        assert rows[num_rows:].tolist() == [-1] * (sizes.num_rows - num_rows)
        sampling = np.isin(planned.sampling_slots, actual.sampling_slots)
        assert rows[:num_rows].tolist() == np.where(sampling, planned.sampling_slots, -1).tolist()
        positions = np.where(rows >= 0, self.truth.num_tokens[rows], 0)
        assert got["sample_positions"].tolist() == positions.tolist()
        assert not got["sources"][num_rows:].any()
        assert not got["logits_rows"][int(planned.samples.sum()) :].any()
        batch = build_batch(self.truth, actual)
        computed = np.repeat(live, planned.num_tokens)
        computed = np.concatenate((computed, np.zeros(spare, np.bool_)))
        for name, empty in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1), ("rope_lens", 1)):
            assert (got[name][..., ~computed] == empty).all(), name
            wanted = got[name][..., :0] if batch is None else getattr(batch, name)
            assert got[name][..., computed].tolist() == wanted.tolist(), name
        if batch is not None:
            self._check_sequences(got, batch, np.flatnonzero(live), actual)

    def _check_sequences(
        self, got: dict[str, np.ndarray[Any, Any]], batch: ForwardBatch, live: IntArray, actual: Scheduled
    ) -> None:
        assert got["seq_lens"][live].tolist() == batch.seq_lens.tolist()
        tables = batch.block_tables.numpy()
        for i, index in enumerate(live):
            num_blocks = -(-int(batch.seq_lens[i]) // LIMITS.block_size)
            assert got["block_tables"][index, ..., :num_blocks].tolist() == tables[i, ..., :num_blocks].tolist()
        blocks = got["block_tables"]
        assert ((blocks >= 0) & (blocks < LIMITS.num_device_blocks)).all(), "entries without meaning are valid blocks"
        wanted = batch.slot_mapping[..., batch.logits_rows].numpy()
        if actual.sources is not None:
            wanted = wanted[..., actual.sources]
        read = got["logits_rows"][got["sources"][got["rows"] >= 0]]
        assert got["slot_mapping"][..., read].tolist() == wanted.tolist()

    def _check_state(self) -> None:
        truth, state = self.truth, self.slots.state
        slots = np.flatnonzero(truth.admitted)
        for name in ("num_tokens", "num_prompt_tokens", "num_computed_tokens", "stopped"):
            assert getattr(state, name).cpu().numpy()[slots].tolist() == getattr(truth, name)[slots].tolist(), name
        token_ids, tables = state.token_ids.cpu().numpy(), state.tables.cpu().numpy()
        for slot in slots:
            num_tokens, num_blocks = truth.num_tokens[slot], truth.places.num_blocks[:, slot].min()
            assert token_ids[slot, :num_tokens].tolist() == truth.token_ids[slot, :num_tokens].tolist()
            assert tables[slot, :, :num_blocks].tolist() == truth.tables[slot, :, :num_blocks].tolist()
