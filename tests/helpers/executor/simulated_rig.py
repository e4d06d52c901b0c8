"""Plans for a simulated executor without a service: a rig for a few sequences, and random histories of many."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from cadenza_common.plan.plan import BlockMoves
from cadenza_common.plan.result import StepResult
from cadenza_common.plan.sampling import SequenceSampling
from executor_svc.plan.limits import Limits
from executor_svc.simulated.costs import StepCosts
from executor_svc.simulated.executor import SimulatedStepExecutor
from executor_svc.simulated.expected_tokens import expected_tokens
from tests.helpers.executor.plans import columns, ints, plan, scheduled, sequence

LIMITS = Limits(
    num_slots=16,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    vocab_size=50,
    max_logprobs=50,
    block_size=8,
    num_device_blocks=64,
    num_host_blocks=32,
    max_inflight_plans=4,
)


def moves(*pairs: tuple[int, int]) -> BlockMoves:
    return BlockMoves(ints(*(pair[0] for pair in pairs)), ints(*(pair[1] for pair in pairs)))


class Rig:
    """A simulated executor and the number of its next step."""

    def __init__(self, limits: Limits = LIMITS, costs: StepCosts | None = None, **fields: Any) -> None:
        self.executor = SimulatedStepExecutor(limits, costs, **fields)
        self._step_id = 0

    def step(self, received_ns: int | None = None, **fields: Any) -> StepResult:
        self._step_id += 1
        return self.executor.execute(plan(step_id=self._step_id, **fields), received_ns)

    def decode(self, count: int, **first: Any) -> list[int]:
        """The tokens of `count` steps of the one slot that is ready; `first` is part of the first of them."""
        tokens: list[int] = []
        for index in range(count):
            tokens += self.step(decode_ready=True, **(first if not index else {})).token_ids.tolist()
        return tokens


@dataclass
class Sequence:
    """A sequence of a random history: what its author knows of it."""

    tokens: list[int]
    num_prompt: int
    sampling: SequenceSampling
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    num_computed: int = 0


class RandomHistory:
    """Sequences that come, grow in chunks, fork, are preempted, swapped, moved to other blocks, and end, at random.

    `step` makes one plan, runs it, and checks every token against what is known in advance.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig()
        self.free = list(range(LIMITS.num_device_blocks))
        self.free_host = list(range(LIMITS.num_host_blocks))
        self.free_slots = list(range(LIMITS.num_slots))
        self.running: list[Sequence] = []
        self.away: list[Sequence] = []
        self.num_tokens = 0
        self.num_swaps = 0
        self.num_copies = 0
        self.num_forks = 0

    def new_sequence(self) -> Sequence:
        rng = self.rng
        prompt = [rng.randrange(LIMITS.vocab_size) for _ in range(rng.randint(1, 40))]
        sampling = SequenceSampling(
            temperature=rng.choice([0.0, 0.7]),
            seed=rng.randrange(2**64),
            sample_index=rng.randrange(4),
            stop_token_ids=ints(*rng.sample(range(LIMITS.vocab_size), rng.randint(0, 3))),
            min_tokens=rng.randint(0, 4),
            allowed_token_ids=ints(*rng.sample(range(LIMITS.vocab_size), 20)) if rng.random() < 0.2 else ints(),
            bad_words=tuple(ints(*rng.choices(range(LIMITS.vocab_size), k=rng.randint(1, 2))) for _ in range(3)),
        )
        return Sequence(prompt, len(prompt), sampling)

    def step(self) -> None:
        rng = self.rng
        fields: dict[str, Any] = {"released_slots": [], "swap_out": [], "copies": [], "swap_in": [], "admitted": []}
        # Blocks that are free once this plan has run: within one, swap-outs and copies still read some of them.
        freed: list[int] = []
        freed_host: list[int] = []
        for item in list(self.running):
            if rng.random() < 0.08:
                self._preempt(item, fields, freed)
            elif rng.random() < 0.1 and len(self.free) > 20:
                self._readmit_in_copies(item, fields, freed)
        for item in list(self.away):
            if rng.random() < 0.5 and len(self.running) < LIMITS.max_num_seqs and len(self.free) > 16:
                self._return(item, fields, freed_host)
        if rng.random() < 0.4 and len(self.running) < LIMITS.max_num_seqs and len(self.free) > 16:
            self._admit(self.new_sequence(), fields)
        appends, work = self._schedule()
        forks = [self._fork(item, fields) for item, _, samples in work if samples and self._may_fork()]
        result = self.rig.step(
            released_slots=ints(*fields["released_slots"]),
            swap_out=moves(*fields["swap_out"]),
            copies=moves(*fields["copies"]),
            swap_in=moves(*fields["swap_in"]),
            admitted=tuple(fields["admitted"]),
            appends=columns(*appends),
            scheduled=scheduled(*((item.slot, count, samples) for item, count, samples in work)),
            forks=columns(*((fork.slot, source.slot) for fork, source in forks)),
        )
        self.free += freed
        self.free_host += freed_host
        for item, count, _ in work:
            item.num_computed += count
        for fork, source in forks:
            self._give_blocks(fork, source)
        self._take(result, [*(item for item, _, samples in work if samples), *(fork for fork, _ in forks)])

    def _schedule(self) -> tuple[list[tuple[int, int]], list[tuple[Sequence, int, bool]]]:
        appends, work, budget = [], [], LIMITS.max_num_batched_tokens
        for item in self.running:
            left = len(item.tokens) - item.num_computed
            count = min(left, budget, self.rng.randint(1, left))
            if not count:
                continue
            budget -= count
            while len(item.blocks) * LIMITS.block_size < item.num_computed + count:
                item.blocks.append(self._take_block())
                appends.append((item.slot, item.blocks[-1]))
            work.append((item, count, count == left))
        return appends, work

    def _may_fork(self) -> bool:
        return self.rng.random() < 0.1 and len(self.running) < LIMITS.max_num_seqs and len(self.free) > 16

    def _fork(self, source: Sequence, fields: dict[str, Any]) -> tuple[Sequence, Sequence]:
        """Another sample of the same tokens, without blocks of its own yet."""
        fork = Sequence(list(source.tokens), source.num_prompt, replace(source.sampling, sample_index=9, seed=1))
        self._admit(fork, fields)
        self.num_forks += 1
        return fork, source

    def _give_blocks(self, fork: Sequence, source: Sequence) -> None:
        """What the source has computed, in blocks of the fork's own."""
        fork.blocks = [self._take_block() for _ in source.blocks]
        fork.num_computed = source.num_computed
        self.rig.step(
            copies=moves(*zip(source.blocks, fork.blocks, strict=True)),
            appends=columns(*((fork.slot, block) for block in fork.blocks)),
        )

    def _take(self, result: StepResult, sampling: list[Sequence]) -> None:
        sampled = {item.slot: item for item in sampling}
        assert result.slots.tolist() == sorted(sampled)
        assert not len(result.error_slots)
        for slot, token in zip(result.slots.tolist(), result.token_ids.tolist(), strict=True):
            item = sampled[slot]
            prompt, output = item.tokens[: item.num_prompt], item.tokens[item.num_prompt :]
            assert [token] == expected_tokens(
                prompt, item.sampling, 1, LIMITS.vocab_size, sample_index=item.sampling.sample_index, output=output
            )
            item.tokens.append(token)
            self.num_tokens += 1
            stopped = token in item.sampling.stop_token_ids and len(output) + 1 >= item.sampling.min_tokens
            if stopped or len(item.tokens) >= LIMITS.max_model_len:
                self._end(item)

    def _end(self, item: Sequence) -> None:
        self.running.remove(item)
        self.rig.step(released_slots=ints(item.slot))
        self.free_slots.append(item.slot)
        self.free += item.blocks

    def _preempt(self, item: Sequence, fields: dict[str, Any], freed: list[int]) -> None:
        """Away from its slot and blocks: swapped to the host, or to be computed again."""
        fields["released_slots"].append(item.slot)
        if self.rng.random() < 0.6 and len(self.free_host) >= len(item.blocks):
            item.host = [self.free_host.pop(self.rng.randrange(len(self.free_host))) for _ in item.blocks]
            fields["swap_out"] += zip(item.blocks, item.host, strict=True)
            self.num_swaps += len(item.host)
        else:
            item.num_computed = 0
        freed += item.blocks
        self._leave(item)

    def _leave(self, item: Sequence) -> None:
        self.running.remove(item)
        self.away.append(item)
        self.free_slots.insert(0, item.slot)
        item.slot, item.blocks = None, []

    def _return(self, item: Sequence, fields: dict[str, Any], freed_host: list[int]) -> None:
        if item.slot is None and not any(pair[1] in item.host for pair in fields["swap_out"]):
            item.blocks = [self._take_block() for _ in item.host]
            fields["swap_in"] += zip(item.host, item.blocks, strict=True)
            freed_host += item.host
            item.host = []
            self.away.remove(item)
            self._admit(item, fields)

    def _readmit_in_copies(self, item: Sequence, fields: dict[str, Any], freed: list[int]) -> None:
        """The same sequence in another slot, its blocks copied."""
        fields["released_slots"].append(item.slot)
        self.free_slots.insert(0, item.slot)
        self.running.remove(item)
        copied = [self._take_block() for _ in item.blocks]
        fields["copies"] += zip(item.blocks, copied, strict=True)
        self.num_copies += len(copied)
        freed += item.blocks
        item.blocks = copied
        self._admit(item, fields)

    def _admit(self, item: Sequence, fields: dict[str, Any]) -> None:
        item.slot = self.free_slots.pop()
        self.running.append(item)
        while len(item.blocks) * LIMITS.block_size < item.num_computed:
            item.blocks.append(self._take_block())
        fields["admitted"].append(
            sequence(
                item.slot, item.tokens, item.blocks, item.num_computed, prompt=item.num_prompt, sampling=item.sampling
            )
        )

    def _take_block(self) -> int:
        return self.free.pop(self.rng.randrange(len(self.free)))
