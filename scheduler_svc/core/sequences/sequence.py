"""Sequences and sequence groups: who they are, what they have, where they are.

A sequence has *confirmed* tokens, seen in a result, and *pending* ones, promised by plans in flight. It is computed
step by step until its KV covers all of its tokens but the newest; prefill, decode and recompute are that one rule.
While it decodes with others, its counts follow from their common clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.beams import BeamSearch
from scheduler_svc.core.types import (
    Candidates,
    Finish,
    FinishDetail,
    PromptLogprobs,
    RequestSpec,
    Sampling,
    SequenceState,
)

_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}
_ENTERING = (SequenceState.WAITING, SequenceState.SWAPPED)


class StepCounter(Protocol):
    """Counts steps in which a sequence computes one token each."""

    num_steps: int


class Sequence:
    """One sample or beam of a request. Counts are in tokens."""

    __slots__ = (
        "_num_computed",
        "_num_planned",
        "_step_counter",
        "_step_offset",
        "block_ids",
        "cache_node",
        "described",
        "finish",
        "group",
        "host_block_ids",
        "kv_source",
        "last_slot",
        "length_detail",
        "max_len",
        "num_cached_blocks",
        "num_hit_tokens",
        "num_prompt_tokens",
        "order_key",
        "prompt_logprobs_end",
        "requested_prompt_logprobs",
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
        self._step_counter: StepCounter | None = None
        self._step_offset = 0
        self.slot: int | None = None
        self.last_slot: int | None = None
        """The slot that it has or had last: late tokens of a preempted sequence come from there."""
        self.described = False
        """Does the executor know it under its slot."""
        self.kv_source: Sequence | None = None
        """Who computes the KV that it shares and that is not there yet."""
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
        self.requested_prompt_logprobs = False
        """Was the executor asked for them when the sequence was last admitted."""
        self.max_len, self.length_detail = _length_limit(spec, max_model_len)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be by plans in flight."""
        return self._num_computed if self._step_counter is None else self._step_counter.num_steps - self._step_offset

    @property
    def num_planned_tokens(self) -> int:
        """Tokens confirmed and pending."""
        return self._num_planned if self._step_counter is None else self._step_counter.num_steps - self._step_offset + 1

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
    def is_decoding(self) -> bool:
        """Does it follow a clock."""
        return self._step_counter is not None

    @property
    def is_beam(self) -> bool:
        """Is it one of the beams of a search: it gets its tokens from there."""
        return self.group.beam_search is not None

    @property
    def awaits_fork(self) -> bool:
        """Does it wait for its group's first sequence to compute the prompt for both."""
        return self.sample_index > 0 and not self.group.forked

    @property
    def is_spare_beam(self) -> bool:
        """Is it a beam that runs no more, or not yet: a slot for a later one."""
        return self.is_beam and self.group.forked and self not in self.group.beams

    @property
    def may_compute(self) -> bool:
        """Has it tokens to compute, and all that goes before them."""
        return self.kv_source is None and not (self.awaits_fork or self.is_spare_beam)

    def compute(self, num_tokens: int) -> bool:
        """Plan the KV of the next tokens; True when all are computed then: it samples one more, a beam candidates."""
        self._num_computed += num_tokens
        samples = self._num_computed == self._num_planned
        self._num_planned += samples and not self.is_beam
        return samples

    def mark_computed(self, num_tokens: int) -> None:
        """So many of its first tokens have their KV in blocks that it shares, or will have."""
        self._num_computed = num_tokens

    @property
    def num_present_tokens(self) -> int:
        """Of its computed tokens those whose KV is there, and not still to come from a sequence that it awaits."""
        if self.kv_source is None:
            return self.num_computed_tokens
        return min(self.num_computed_tokens, self.kv_source.num_present_tokens)

    def stop_awaiting_kv(self) -> None:
        """Wait for nobody: of the KV that it shares only what is there counts."""
        if self.kv_source is not None:
            self._num_computed = self.num_present_tokens
            self.kv_source = None

    def fork(self, source: Sequence) -> None:
        """Sample from the row that `source` samples from in this step: all that it has computed counts here too."""
        self._num_computed = source._num_computed
        self._num_planned = source._num_planned

    def set_output(self, output: list[int]) -> None:
        """Be the beam of this output, of which the last token is still to be computed."""
        self.token_ids[self.num_prompt_tokens :] = output
        self._num_planned = len(self.token_ids)
        self._num_computed = self._num_planned - 1

    def attach_step_counter(self, counter: StepCounter) -> None:
        """From now on compute one token with every tick."""
        self._step_offset = counter.num_steps - self._num_computed
        self._step_counter = counter

    def detach_step_counter(self) -> None:
        """Leave the clock and keep the counts."""
        self._num_computed, self._num_planned = self.num_computed_tokens, self.num_planned_tokens
        self._step_counter = None

    def forget_executor_state(self) -> None:
        """The executor that it ran on is lost, with all that it held there."""
        if self._step_counter is not None:
            self.detach_step_counter()
        self.drop_pending_tokens()
        self.slot, self.described = None, False
        self.group.reserve = []
        self.block_ids, self.host_block_ids = [], []
        self.num_cached_blocks, self.cache_node = 0, None

    def recompute_last_token(self) -> None:
        """A beam whose tokens are all computed computes the last again, as what its candidates are is not known."""
        if self.is_beam:
            self._num_computed = min(self._num_computed, len(self.token_ids) - 1)

    def drop_pending_tokens(self) -> None:
        """What plans in flight were to sample will not come."""
        self._num_planned = len(self.token_ids)

    def end_after_planned(self, detail: FinishDetail) -> None:
        """Let it end with the tokens that are planned already, for this reason."""
        self.max_len = self.num_planned_tokens
        self.length_detail = detail

    def apply_max_model_len(self, max_model_len: int) -> None:
        """Let it end with this many tokens, if it may have more."""
        if self.max_len > max_model_len:
            self.max_len, self.length_detail = max_model_len, FinishDetail.MAX_MODEL_LEN

    def move(self, state: SequenceState) -> None:
        """The one place where a state changes; raises InvariantError for a step the table does not have."""
        if state not in _TRANSITIONS[self.state]:
            raise InvariantError(f"sequence {self.sequence_id}: {self.state.name} cannot become {state.name}")
        self.state = state

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Are logprobs of the prompt wanted of it, its group's first sequence, that are not known yet."""
        wanted = self.sample_index == 0 and self.group.spec.sampling.num_prompt_logprobs is not None
        return wanted and self.prompt_logprobs_end < self.num_prompt_tokens

    def admitted_sampling(self) -> Sampling:
        """What an executor is told at admission: prompt logprobs that are all known are not asked for again."""
        sampling = self.group.spec.sampling
        self.requested_prompt_logprobs = self.needs_prompt_logprobs
        if sampling.num_prompt_logprobs is not None and not self.requested_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        if self.group.beam_search is not None and not sampling.num_candidates:
            sampling = replace(sampling, num_candidates=self.group.beam_search.num_candidates)
        return sampling

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

    def reset_computed_tokens(self) -> None:
        """Start over: its KV is gone. Tokens stay."""
        self._num_computed = 0
        self.kv_source = None

    def check_stop(self, token_id: int) -> Finish | None:
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
        "beam_search",
        "beams",
        "candidates",
        "forked",
        "key",
        "max_failed_context_len",
        "num_awaited",
        "num_failed_steps",
        "num_preemptions",
        "queued",
        "reserve",
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
        self.queued = False
        """Is it in the waiting queue."""
        self.forked = spec.num_sequences == 1
        """Have its sequences gone their own ways; before, the first computes the prompt for all."""
        self.beam_search: BeamSearch | None = None
        self.beams: list[Sequence] = []
        """Of a search that has forked: the beams that run, best first."""
        self.candidates: dict[Sequence, Candidates] = {}
        """What its beams have been told in this round."""
        self.num_awaited = 0
        """Candidates of its beams that plans in flight will tell."""
        self.reserve: list[int] = []
        """Device blocks that are held for its beams to grow into."""
        self.num_failed_steps = 0
        """Failed steps that it was part of since it last got any further."""
        self.max_failed_context_len = 0
        """Most tokens with KV that one of its sequences had when a step failed."""

    @property
    def finished(self) -> bool:
        """Have all of its sequences ended?"""
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    def drop_candidates(self) -> None:
        """What plans in flight were to tell of its beams will not come."""
        self.candidates.clear()
        self.num_awaited = 0

    @property
    def running(self) -> list[Sequence]:
        """Those that hold a slot."""
        return [sequence for sequence in self.sequences if sequence.slot is not None]

    @property
    def waiting_sequences(self) -> list[Sequence]:
        """Those that wait for room of their own: before the fork the first one, then all that were put out."""
        first = self.sequences if self.forked else self.sequences[:1]
        return [sequence for sequence in first if sequence.state in _ENTERING]

    @property
    def has_all_results(self) -> bool:
        """Nothing that plans in flight will tell of those that wait is missing."""
        return not self.num_awaited and not any(sequence.num_pending for sequence in self.waiting_sequences)

    @property
    def can_admit_partially(self) -> bool:
        """Can a part of it run: samples that have forked, whose KV must be computed again."""
        return self.forked and self.beam_search is None and not self.swapped

    @property
    def due_beams(self) -> list[Sequence]:
        """Beams that have a token to compute."""
        return [beam for beam in self.beams if beam.num_uncomputed_tokens == 1]

    @property
    def swapped(self) -> bool:
        """Was it swapped out."""
        return any(sequence.state is SequenceState.SWAPPED for sequence in self.sequences)


def _length_limit(spec: RequestSpec, max_model_len: int) -> tuple[int, FinishDetail]:
    if spec.max_tokens is not None and len(spec.prompt_token_ids) + spec.max_tokens <= max_model_len:
        return len(spec.prompt_token_ids) + spec.max_tokens, FinishDetail.MAX_TOKENS
    return max_model_len, FinishDetail.MAX_MODEL_LEN
