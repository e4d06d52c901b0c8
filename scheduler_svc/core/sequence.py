"""Sequences and sequence groups: who they are, what they have, where they are.

A sequence has *confirmed* tokens, seen in a result, and *pending* ones, promised by plans in flight. It is computed
step by step until its KV covers all of its tokens but the newest; prefill, decode and recompute are that one rule.
"""

from __future__ import annotations

from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.types import Finish, FinishDetail, RequestSpec, SequenceState

_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


class Sequence:
    """One sample of a request. Counts are in tokens."""

    __slots__ = (
        "block_ids",
        "finish",
        "group",
        "length_detail",
        "max_len",
        "num_computed_tokens",
        "num_pending",
        "num_prompt_tokens",
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
        self.state = SequenceState.WAITING
        self.finish: Finish | None = None
        self.token_ids: list[int] = list(spec.prompt_token_ids)
        self.num_prompt_tokens = len(spec.prompt_token_ids)
        self.num_pending = 0
        self.num_computed_tokens = 0
        self.slot: int | None = None
        self.block_ids: list[int] = []
        self.max_len, self.length_detail = _length_limit(spec, max_model_len)

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens confirmed and pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV no plan has computed yet; 1 while it decodes."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def fully_planned(self) -> bool:
        """Are all tokens that it may have planned: nothing is left to compute for it."""
        return len(self.token_ids) + self.num_pending >= self.max_len

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

    def forget_computed(self) -> None:
        """Start over: its KV is gone. Confirmed tokens stay."""
        self.num_computed_tokens = 0

    def confirm(self, token_id: int) -> Finish | None:
        """Take in a token that was pending; returns how the sequence ends with it, if it does."""
        self.token_ids.append(token_id)
        spec = self.group.spec
        if token_id in self.group.stop_ids and self.num_output_tokens >= spec.sampling.min_tokens:
            if token_id in spec.eos_token_ids:
                return Finish(FinishDetail.EOS)
            return Finish(FinishDetail.STOP_TOKEN, stop_token_id=token_id)
        if len(self.token_ids) >= self.max_len:
            return Finish(self.length_detail)
        return None


class SequenceGroup:
    """One request with its sequences, and its place in the order of arrival."""

    __slots__ = (
        "arrival",
        "arrival_number",
        "furthest",
        "num_preemptions",
        "num_strikes",
        "sequences",
        "spec",
        "stop_ids",
    )

    def __init__(self, spec: RequestSpec, arrival_number: int, arrival: float) -> None:
        self.spec = spec
        self.arrival_number = arrival_number
        self.arrival = arrival
        self.sequences: list[Sequence] = []
        self.stop_ids = frozenset(spec.sampling.stop_token_ids)
        self.num_preemptions = 0
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
