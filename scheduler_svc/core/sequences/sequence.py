"""Sequences and sequence groups: identity, state, blocks, and what a group shares."""

from __future__ import annotations

from dataclasses import replace

from cadenza_common.plan.result import Candidates, LogprobColumns
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.errors import InvariantError
from scheduler_svc.core.sequences.beams import BeamSearch
from scheduler_svc.core.sequences.sequence_memory import SequenceMemory
from scheduler_svc.core.sequences.sequence_tokens import StepCounter
from scheduler_svc.core.types import NEXT_STATES, Finish, FinishDetail, RequestSpec, SequenceState

_EOS = Finish(FinishDetail.EOS)
_ADMISSIBLE = (SequenceState.WAITING, SequenceState.SWAPPED)
_BOUND = (SequenceState.RUNNING, SequenceState.SWAPPED)


class Sequence(SequenceMemory):
    """One sample or beam of a request."""

    __slots__ = (
        "described",
        "draft_scope",
        "finish",
        "group",
        "is_beam",
        "kv_source",
        "last_slot",
        "length_detail",
        "max_drafts",
        "max_len",
        "num_hit_tokens",
        "order_key",
        "prompt_logprobs_end",
        "requested_prompt_logprobs",
        "sample_index",
        "sequence_id",
        "slot",
        "state",
        "suspected",
        "tenant",
    )

    def __init__(self, sequence_id: int, group: SequenceGroup, sample_index: int) -> None:
        spec = group.spec
        super().__init__(spec.prompt_token_ids)
        self.sequence_id = sequence_id
        self.group = group
        self.tenant = spec.tenant
        """That of its group, kept here because each step counts its tokens by tenant."""
        self.sample_index = sample_index
        self.is_beam = spec.beams is not None
        """Whether it belongs to a beam search, which chooses its tokens."""
        self.order_key: tuple[float, ...] = ()
        """Sort key in the running queue."""
        self.state = SequenceState.WAITING
        self.finish: Finish | None = None
        self.slot: int | None = None
        self.last_slot: int | None = None
        """The slot that it has or had last: late tokens of a preempted sequence arrive for this slot."""
        self.described = False
        """Whether the executor has its description under its slot."""
        self.kv_source: Sequence | None = None
        """The sequence that is still computing KV in blocks shared with this one; None if all shared KV is there."""
        self.max_drafts = 0
        """The most drafts in a step, as its description says."""
        self.draft_scope = 0
        """With drafts: a number for all sequences that may see each other's tokens; 0: no others."""
        self.num_hit_tokens = 0
        """Number of tokens found in the prefix cache at the last admission."""
        self.prompt_logprobs_end = 1
        """Prompt tokens before this index have known logprobs, except the first, which has none."""
        self.suspected: range | None = None
        """Positions at which it may have killed an executor; only a trial computes them. None: it is no suspect."""
        self.requested_prompt_logprobs = False
        """Whether prompt logprobs were requested from the executor at the last admission."""
        self.max_len, self.length_detail = spec.length_limit(group.max_model_len)

    @property
    def fully_planned(self) -> bool:
        """Whether its maximum number of tokens is planned, so that nothing is left to compute."""
        return self.num_planned_tokens >= self.max_len

    @property
    def awaits_fork(self) -> bool:
        """Whether it waits for its group's first sequence to compute the shared prompt."""
        return self.sample_index > 0 and not self.group.forked

    @property
    def is_spare_beam(self) -> bool:
        """Whether it is a beam sequence without a current beam: it keeps a slot for a later one."""
        group = self.group
        return group.beam_search is not None and group.forked and self not in group.beams

    @property
    def may_compute(self) -> bool:
        """Whether it may compute tokens: the KV of all tokens before them is there."""
        group = self.group
        if group.forked and group.beam_search is None:
            return self.kv_source is None
        return self.kv_source is None and not (self.awaits_fork or self.is_spare_beam)

    def schedule(self, num_tokens: int) -> bool:
        """Plan the KV of the next tokens; True if all are computed then, so that it samples (a beam: candidates)."""
        self._num_computed += num_tokens
        samples = self._num_computed == self._num_planned
        self._num_planned += samples and not self.is_beam
        return samples

    @property
    def num_present_tokens(self) -> int:
        """Number of computed tokens whose KV is there, without KV that its kv_source has yet to compute."""
        if self.kv_source is None:
            return self.num_computed_tokens
        return min(self.num_computed_tokens, self.kv_source.num_present_tokens)

    def stop_awaiting_kv(self) -> None:
        """Drop kv_source: only shared KV that is there counts as computed."""
        if self.kv_source is not None:
            self._num_computed = self.num_present_tokens
            self.kv_source = None

    def forget_executor_state(self) -> None:
        """Reset after the loss of the executor: slot, blocks and pending tokens are gone."""
        self.roll_back(0)
        self.slot = None
        self.group.reserved_blocks = []
        self.forget_memory()

    def roll_back(self, num_computed: int) -> None:
        """Reset after the end of a session: KV of the first `num_computed` tokens and the blocks stay."""
        self._step_counter = None
        self._num_computed, self._num_planned = num_computed, self.num_tokens
        self.described = False
        self.num_cached_blocks, self.cache_node = 0, None

    def recompute_last_token(self) -> None:
        """Let a beam compute its last token again after a preemption, because its candidates are unknown."""
        if self.is_beam:
            self._num_computed = min(self._num_computed, self.num_tokens - 1)

    def finish_after_planned(self, detail: FinishDetail) -> None:
        """Lower the maximum length to the tokens planned so far; the sequence finishes with `detail`."""
        self.max_len = self.num_planned_tokens
        self.length_detail = detail

    def apply_max_model_len(self, max_model_len: int) -> None:
        """Set the maximum length for an executor with this limit; a former executor's limit no longer counts."""
        self.max_len, self.length_detail = self.group.length_limit(max_model_len)

    def change_state(self, state: SequenceState) -> None:
        """Change the state, here only; raises InvariantError for a transition that the table does not have."""
        if state not in NEXT_STATES[self.state]:
            raise InvariantError(f"sequence {self.sequence_id}: {self.state.name} cannot become {state.name}")
        self.state = state

    def start_decoding(self, slot: int, counter: StepCounter) -> int:
        """Take a slot in the decode batch, once a plan describes a waiting sequence and computes all of its tokens.

        Returns their number; raises InvariantError if it does not wait.
        """
        if self.state is not SequenceState.WAITING:
            raise InvariantError(f"sequence {self.sequence_id}: {self.state.name} cannot start")
        num_computed = self.num_tokens
        self.state = SequenceState.RUNNING
        self.slot = self.last_slot = slot
        self.described = True
        self._step_offset = counter.num_steps - num_computed
        self._step_counter = counter
        return num_computed

    def finish_decoding(self) -> int:
        """Finish in the decode batch: it keeps its counts and loses its slot, which is returned.

        Raises InvariantError if it is not there.
        """
        slot, counter = self.slot, self._step_counter
        if slot is None or counter is None:
            raise InvariantError(f"sequence {self.sequence_id} does not decode")
        self._num_computed = num_computed = counter.num_steps - self._step_offset
        self._num_planned = num_computed + 1
        self._step_counter = None
        self.state = SequenceState.FINISHED
        self.slot, self.described = None, False
        return slot

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether it is its group's first sequence and some requested prompt logprobs are still unknown."""
        if self.group.spec.sampling.num_prompt_logprobs is None:
            return False
        return self.sample_index == 0 and self.prompt_logprobs_end < self.num_prompt_tokens

    def admitted_sampling(self) -> SequenceSampling:
        """The sampling parameters for the executor at admission; known prompt logprobs are not requested again."""
        sampling = self.group.spec.sampling
        self.requested_prompt_logprobs = self.needs_prompt_logprobs
        if sampling.num_prompt_logprobs is not None and not self.requested_prompt_logprobs:
            sampling = replace(sampling, num_prompt_logprobs=None)
        if self.group.beam_search is not None and not sampling.num_candidates:
            sampling = replace(sampling, num_candidates=self.group.beam_search.num_candidates)
        return sampling

    def predicted_prompt_tokens(self, num_tokens: int) -> range:
        """The prompt tokens whose logprobs result from computing the next `num_tokens` tokens."""
        start = self.num_computed_tokens + 1
        return range(start, min(start + num_tokens, self.num_prompt_tokens))

    def take_prompt_logprobs(self, logprobs: LogprobColumns) -> LogprobColumns | None:
        """The rows of a result's prompt logprobs that are new: after a preemption all are computed again."""
        start, end = self.prompt_logprobs_end, logprobs.end
        if end <= start:
            return None
        self.prompt_logprobs_end = end
        return logprobs.rows(start, end)

    def reset_computed_tokens(self) -> None:
        """Reset the computed count: its KV is freed. Tokens stay."""
        self._num_computed = 0
        self.kv_source = None

    def check_stop(self, token_id: int) -> Finish | None:
        """The finish if this token, its newest, is a stop id and min_tokens is reached; else None."""
        spec = self.group.spec
        if token_id not in spec.sampling.stop_token_ids or self.num_output_tokens < spec.sampling.min_tokens:
            return None
        if token_id in spec.eos_token_ids:
            return _EOS
        return Finish(FinishDetail.STOP_TOKEN, stop_token_id=token_id)


def held_slot(sequence: Sequence) -> int:
    """The slot of a running sequence; raises InvariantError if it has none."""
    if sequence.slot is None:
        raise InvariantError(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot


class SequenceGroup:
    """A sequence group: one request with its sequences and its arrival number."""

    __slots__ = (
        "adapter_hash",
        "arrival",
        "arrival_number",
        "beam_search",
        "beams",
        "candidates",
        "forked",
        "held_until",
        "key",
        "lane_id",
        "max_model_len",
        "num_pending_candidates",
        "num_placed_tokens",
        "num_preemptions",
        "numerics",
        "outgrown_kv_tokens",
        "placed_on",
        "queued",
        "reserved_blocks",
        "sequences",
        "spec",
        "was_admitted",
        "was_suspected",
    )

    def __init__(self, spec: RequestSpec, arrival_number: int, arrival: float, max_model_len: int) -> None:
        """max_model_len: the largest limit of the executors when it arrived; it never has more tokens."""
        self.spec = spec
        self.adapter_hash = b""
        """The content of its adapter, which its KV depends on; known once it is queued. Empty: none."""
        self.max_model_len = max_model_len
        self.key = spec.key
        self.arrival_number = arrival_number
        self.arrival = arrival
        self.sequences: list[Sequence] = []
        self.num_preemptions = 0
        self.was_admitted = False
        self.was_suspected = False
        """Whether it was suspected of having killed an executor: it has no more drafts, since no trial has any."""
        self.queued = False  # in the waiting queue
        self.forked = spec.num_sequences == 1
        """Whether its sequences run separately; before the fork, the first one computes the prompt for all."""
        self.beam_search: BeamSearch | None = None
        self.beams: list[Sequence] = []
        """After the fork of a beam search: the running beams, best first."""
        self.candidates: dict[Sequence, Candidates] = {}
        """Candidates received for its beams at the current length."""
        self.num_pending_candidates = 0
        """Number of candidate lists for its beams that plans in flight will return."""
        self.reserved_blocks: list[int] = []
        """Device blocks reserved for the growth of its beams."""
        self.lane_id: int | None = None
        """The executor that runs it, or ran it last: what it holds, it holds there. None: it has never run."""
        self.held_until = 0
        """When it has stopped running there: the executor's newest step that still refers to it."""
        self.numerics: bytes | None = None
        """The numerics of that executor, under which it goes on; None: it has never run in this process."""
        self.outgrown_kv_tokens = 0
        """Size of the largest pool, in tokens, that it has outgrown."""
        self.placed_on: int | None = None
        """While it waits: the executor that it waits for; None: any, or not placed yet."""
        self.num_placed_tokens = 0
        """Number of tokens that it was to compute there when it was placed."""

    def length_limit(self, max_model_len: int) -> tuple[int, FinishDetail]:
        """The maximum length of its sequences on an executor with this limit, and the reason to finish there."""
        return self.spec.length_limit(min(max_model_len, self.max_model_len))

    @property
    def is_bound(self) -> bool:
        """Whether one of its sequences runs or is swapped out: until then it stays with its executor."""
        return any(sequence.state in _BOUND for sequence in self.sequences)

    @property
    def has_output(self) -> bool:
        """Whether an executor has sampled for it: a token was confirmed, or beams were chosen."""
        return any(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        """Whether all of its sequences have finished."""
        if len(self.sequences) == 1:
            return self.sequences[0].state is SequenceState.FINISHED
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    def release_sequences(self) -> None:
        """Drop its finished sequences.

        Each refers to its group: together they would be a cycle, and stay in memory until the garbage collector runs.
        """
        self.sequences = []
        if self.beam_search is not None:
            self.beams = []
            self.candidates.clear()

    def drop_candidates(self) -> None:
        """Drop candidates: plans in flight will not return them."""
        self.candidates.clear()
        self.num_pending_candidates = 0

    @property
    def running(self) -> list[Sequence]:
        """Its sequences that hold a slot."""
        return [sequence for sequence in self.sequences if sequence.slot is not None]

    @property
    def waiting_sequences(self) -> list[Sequence]:
        """Sequences waiting for admission: before the fork at most the first one, later all preempted ones."""
        first = self.sequences if self.forked else self.sequences[:1]
        return [sequence for sequence in first if sequence.state in _ADMISSIBLE]

    @property
    def has_all_results(self) -> bool:
        """Whether no plan in flight still returns tokens or candidates for its waiting sequences.

        With drafts a sequence may reach its maximum length by fewer plans than were made for it.
        """
        return not (
            self.num_pending_candidates
            or [each for each in self.waiting_sequences if each.num_pending and each.num_tokens < each.max_len]
        )

    @property
    def can_admit_partially(self) -> bool:
        """Whether a part of it can be admitted: only samples after the fork whose KV is recomputed."""
        return self.forked and self.beam_search is None and not self.swapped

    @property
    def due_beams(self) -> list[Sequence]:
        """Its beams that have a token to compute."""
        return [beam for beam in self.beams if beam.num_uncomputed_tokens == 1]

    @property
    def swapped(self) -> bool:
        """Whether one of its sequences is swapped out."""
        if len(self.sequences) == 1:
            return self.sequences[0].state is SequenceState.SWAPPED
        return any(sequence.state is SequenceState.SWAPPED for sequence in self.sequences)
