"""Sequences and sequence groups: who they are, what they have, where they are.

A sequence has *confirmed* tokens, seen in a result, and *pending* ones, promised by plans in flight. It is computed
step by step until its KV covers all of its tokens but the newest; prefill, decode and recompute are that one rule.
While it decodes with others, its counts follow from their common clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import Finish, FinishDetail, PromptLogprobs, RequestSpec, Sampling, SequenceState

_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Clock(Protocol):
    """Counts steps in which a sequence computes one token each."""

    clock: int


class Sequence:
    """One sample of a request. Counts are in tokens."""

    __slots__ = (
        "_clock",
        "_clock_offset",
        "_num_computed",
        "_num_planned",
        "asks_prompt_logprobs",
        "block_ids",
        "cache_node",
        "finish",
        "group",
        "host_block_ids",
        "last_slot",
        "length_detail",
        "max_len",
        "num_cached_blocks",
        "num_hit_tokens",
        "num_prompt_tokens",
        "order_key",
        "prompt_logprobs_end",
        "sample_index",
        "sequence_id",
        "slot",
        "state",
        "token_ids",
    )

    def __init__(self, sequence_id: int, group: SequenceGroup, sample_index: int, max_model_len: int) -> None:
        spec = group.spec
        self.sequence_id = sequence_id
        self.group = group
        self.sample_index = sample_index
        self.order_key: tuple[float, ...] = ()
        """Its place among those that run."""
        self.state = SequenceState.WAITING
        self.finish: Finish | None = None
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self._num_computed = 0
        self._num_planned = len(spec.prompt_token_ids)
        self._clock: Clock | None = None
        self._clock_offset = 0
        self.slot: int | None = None
        self.last_slot: int | None = None
        """The slot that it has or had last: late tokens of a preempted sequence come from there."""
        self.block_ids: list[int] = []
        self.host_block_ids: list[int] = []
        """Where its KV is while it is swapped out."""
        self.num_cached_blocks = 0
        """Leading blocks that are in the prefix cache, or came from there."""
        self.cache_node: int | None = None
        """The prefix cache's name for the last of them."""
        self.num_hit_tokens = 0
        """Tokens whose KV came from the prefix cache when it was last admitted."""
        self.prompt_logprobs_end = 1
        """Prompt tokens before this index have known logprobs, or none: the first one."""
        self.asks_prompt_logprobs = False
        """Was the executor asked for them when the sequence was last admitted."""
        self.max_len, self.length_detail = _length_limit(spec, max_model_len)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be by plans in flight."""
        return self._num_computed if self._clock is None else self._clock.clock - self._clock_offset

    @property
    def num_planned_tokens(self) -> int:
        """Tokens confirmed and pending."""
        return self._num_planned if self._clock is None else self._clock.clock - self._clock_offset + 1

    @property
    def num_pending(self) -> int:
        """Tokens that plans in flight will sample."""
        return self.num_planned_tokens - len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV no plan has computed yet; 1 while it decodes."""
        return self.num_planned_tokens - self.num_computed_tokens

    @property
    def fully_planned(self) -> bool:
        """Are all tokens that it may have planned: nothing is left to compute for it."""
        return self.num_planned_tokens >= self.max_len

    @property
    def decodes(self) -> bool:
        """Does it follow a clock."""
        return self._clock is not None

    def compute(self, num_tokens: int) -> bool:
        """Plan the KV of the next tokens; with all of them computed it samples one more, and True is returned."""
        self._num_computed += num_tokens
        samples = self._num_computed == self._num_planned
        self._num_planned += samples
        return samples

    def follow(self, clock: Clock) -> None:
        """From now on compute one token with every tick."""
        self._clock_offset = clock.clock - self._num_computed
        self._clock = clock

    def unfollow(self) -> None:
        """Leave the clock and keep the counts."""
        self._num_computed, self._num_planned = self.num_computed_tokens, self.num_planned_tokens
        self._clock = None

    def forget_pending(self) -> None:
        """What plans in flight were to sample will not come."""
        self._num_planned = len(self.token_ids)

    def limit_to_planned(self, detail: FinishDetail) -> None:
        """Let it end with the tokens that are planned already, for this reason."""
        self.max_len = self.num_planned_tokens
        self.length_detail = detail

    def limit_to_model(self, max_model_len: int) -> None:
        """Let it end with this many tokens, if it may have more."""
        if self.max_len > max_model_len:
            self.max_len, self.length_detail = max_model_len, FinishDetail.MAX_MODEL_LEN

    def move(self, state: SequenceState) -> None:
        """The one place where a state changes; raises InvariantError for a step the table does not have."""
        if state not in _TRANSITIONS[self.state]:
            raise InvariantError(f"sequence {self.sequence_id}: {self.state.name} cannot become {state.name}")
        self.state = state

    def admitted_sampling(self) -> Sampling:
        """What an executor is told at admission: prompt logprobs that are all known are not asked for again."""
        sampling = self.group.spec.sampling
        wanted = sampling.num_prompt_logprobs is not None
        self.asks_prompt_logprobs = wanted and self.prompt_logprobs_end < self.num_prompt_tokens
        return replace(sampling, num_prompt_logprobs=None) if wanted and not self.asks_prompt_logprobs else sampling

    def predicted_prompt_tokens(self, num_tokens: int) -> range:
        """The prompt tokens whose logprobs the next `num_tokens` tokens to be computed give."""
        start = self.num_computed_tokens + 1
        return range(start, min(start + num_tokens, self.num_prompt_tokens))

    def take_prompt_logprobs(self, logprobs: PromptLogprobs) -> PromptLogprobs | None:
        """What is new of a result's prompt logprobs: after a preemption they are computed again from the beginning."""
        start, end = self.prompt_logprobs_end, logprobs.end
        if end <= start:
            return None
        self.prompt_logprobs_end = end
        return logprobs.rows(start, end)

    def forget_computed(self) -> None:
        """Start over: its KV is gone. Tokens stay."""
        self._num_computed = 0

    def stops_with(self, token_id: int) -> Finish | None:
        """How the sequence ends with this token, its newest, if that is one of its stop ids and may stop it."""
        spec = self.group.spec
        if token_id not in self.group.stop_ids or self.num_output_tokens < spec.sampling.min_tokens:
            return None
        if token_id in spec.eos_token_ids:
            return Finish(FinishDetail.EOS)
        return Finish(FinishDetail.STOP_TOKEN, stop_token_id=token_id)


def held_slot(sequence: Sequence) -> int:
    """The slot of a running sequence; raises InvariantError if it has none."""
    if sequence.slot is None:
        raise InvariantError(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot


class SequenceGroup:
    """One request with its sequences, and its place in the order of arrival."""

    __slots__ = (
        "arrival",
        "arrival_number",
        "furthest",
        "key",
        "num_preemptions",
        "num_strikes",
        "sequences",
        "spec",
        "stop_ids",
        "was_admitted",
    )

    def __init__(self, spec: RequestSpec, arrival_number: int, arrival: float) -> None:
        self.spec = spec
        self.key = spec.key
        self.arrival_number = arrival_number
        self.arrival = arrival
        self.sequences: list[Sequence] = []
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)
        self.num_preemptions = 0
        self.was_admitted = False
        self.num_strikes = 0
        """Failed steps that it was part of since it last got any further."""
        self.furthest = 0
        """Most tokens with KV that one of its sequences had when a step failed."""

    @property
    def finished(self) -> bool:
        """Have all of its sequences ended?"""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)


def _length_limit(spec: RequestSpec, max_model_len: int) -> tuple[int, FinishDetail]:
    if spec.max_tokens is not None and len(spec.prompt_token_ids) + spec.max_tokens <= max_model_len:
        return len(spec.prompt_token_ids) + spec.max_tokens, FinishDetail.MAX_TOKENS
    return max_model_len, FinishDetail.MAX_MODEL_LEN
