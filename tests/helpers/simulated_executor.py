"""An executor without a model: the plan protocol's semantics in plain Python, its KV cache real bookkeeping.

Each block position holds a digest of all tokens up to it, chained through what the block table reads back, and the next
token is a hash of the newest digest: a wrong block table, a block used too early or a wrong count gives wrong tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.types import AdmittedSequence, ExecutorSpec, PromptLogprobs, StepPlan, StepResult

VOCAB_SIZE = 50


def digest(previous: bytes, token_id: int) -> bytes:
    return hashlib.sha256(previous + token_id.to_bytes(4, "little")).digest()


def next_token(state: bytes, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(state + seed.to_bytes(8, "little")).digest()[:4], "little") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], seed: int, count: int, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The tokens that a request must get, whatever it is batched with."""
    state = b""
    for token_id in prompt:
        state = digest(state, token_id)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(next_token(state, seed))
        if tokens[-1] in stop_ids:
            break
        state = digest(state, tokens[-1])
    return tokens


def expected_prompt_logprobs(prompt: Sequence[int], num_top: int, start: int = 1) -> PromptLogprobs:
    """Logprobs of the prompt tokens from `start` on: functions of all tokens before each, and of itself."""
    states = [b""]
    for token_id in prompt:
        states.append(digest(states[-1], token_id))
    return prompt_columns(states[start : len(prompt)], prompt[start:], num_top, start)


def prompt_columns(states: Sequence[bytes], token_ids: Sequence[int], num_top: int, start: int) -> PromptLogprobs:
    """Columns for tokens that follow these states."""
    draws = [digest(state, token_id) for state, token_id in zip(states, token_ids, strict=True)]
    return PromptLogprobs(
        start=start,
        logprobs=[-float(draw[0]) for draw in draws],
        ranks=[1 + draw[1] for draw in draws],
        num_top=num_top,
        top_token_ids=[draw[2 + place] % VOCAB_SIZE for draw in draws for place in range(num_top)],
        top_logprobs=[-float(draw[8 + place]) for draw in draws for place in range(num_top)],
    )


@dataclass
class Slot:
    admitted: AdmittedSequence
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    stopped: bool = False


@dataclass
class SimulatedExecutor:
    spec: ExecutorSpec
    slots: dict[int, Slot] = field(default_factory=dict)
    kv: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out a plan; every contradiction is an AssertionError."""
        for slot_id in plan.released_slots:
            del self.slots[slot_id]
        for admitted in plan.admitted:
            assert admitted.slot not in self.slots, f"slot {admitted.slot} is taken"
            assert 0 <= admitted.slot < self.spec.num_slots
            assert admitted.num_computed_tokens < len(admitted.token_ids)
            self.slots[admitted.slot] = Slot(
                admitted, list(admitted.token_ids), list(admitted.block_ids), admitted.num_computed_tokens
            )
        for slot_id, block_id in zip(plan.append_slots, plan.append_block_ids, strict=True):
            self.slots[slot_id].block_ids.append(block_id)
        work = dict(zip(plan.scheduled_slots, plan.scheduled_num_tokens, strict=True))
        samples = dict(zip(plan.scheduled_slots, plan.scheduled_samples, strict=True))
        if plan.decode_ready:
            for slot_id, slot in self.slots.items():
                # A stopped slot is not ready, though the plan's author does not know yet: it gets no answer.
                if slot_id not in work and not slot.stopped and len(slot.token_ids) - slot.num_computed == 1:
                    work[slot_id], samples[slot_id] = 1, True
        live = {slot_id: count for slot_id, count in work.items() if not self.slots[slot_id].stopped}
        assert len(live) <= self.spec.max_num_seqs
        assert sum(live.values()) <= self.spec.max_num_batched_tokens
        return self._result(plan, work, samples)

    def _result(self, plan: StepPlan, work: dict[int, int], samples: dict[int, bool]) -> StepResult:
        slots, counts, tokens = [], [], []
        prompt_logprobs: dict[int, PromptLogprobs] = {}
        for slot_id, count in work.items():
            slot = self.slots[slot_id]
            start = slot.num_computed + 1
            token = None if slot.stopped else self._compute(slot, count, samples[slot_id])
            if samples[slot_id]:
                slots.append(slot_id)
                counts.append(0 if token is None else 1)
                tokens += [] if token is None else [token]
            if (columns := self._prompt_logprobs(slot, start, start + count)) is not None:
                prompt_logprobs[slot_id] = columns
        return StepResult(
            plan.step_id, slots=slots, num_tokens=counts, token_ids=tokens, prompt_logprobs=prompt_logprobs,
            total_ns=1000,
        )  # fmt: skip

    def _prompt_logprobs(self, slot: Slot, start: int, end: int) -> PromptLogprobs | None:
        """Of the prompt tokens start to end - 1, as far as there are any and they were asked for."""
        num_top, end = slot.admitted.sampling.num_prompt_logprobs, min(end, slot.admitted.num_prompt_tokens)
        if num_top is None or start >= end:
            return None
        states = [self.kv[self._place(slot, position - 1)] for position in range(start, end)]
        return prompt_columns(states, slot.token_ids[start:end], num_top, start)

    def _compute(self, slot: Slot, count: int, sample: bool) -> int | None:
        assert count <= len(slot.token_ids) - slot.num_computed, "more tokens than are known"
        state = b""
        for position in range(slot.num_computed, slot.num_computed + count):
            previous = self.kv[self._place(slot, position - 1)] if position else b""
            state = digest(previous, slot.token_ids[position])
            self.kv[self._place(slot, position)] = state
        slot.num_computed += count
        if not sample:
            return None
        assert slot.num_computed == len(slot.token_ids), "a sample without all tokens computed"
        token = next_token(state, slot.admitted.sampling.seed)
        slot.token_ids.append(token)
        num_output = len(slot.token_ids) - slot.admitted.num_prompt_tokens
        sampling = slot.admitted.sampling
        if token in sampling.stop_token_ids and num_output >= sampling.min_tokens:
            slot.stopped = True
        return token

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.spec.block_size)
        assert index < len(slot.block_ids), f"position {position} is outside of the block table"
        return slot.block_ids[index], offset
