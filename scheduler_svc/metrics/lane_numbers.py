"""Numbers about the steps of one executor."""

from __future__ import annotations

from collections import Counter
from copy import copy

from cadenza_common.metrics.histogram import Histogram
from cadenza_common.plan.result import StepResult
from scheduler_svc.core.lanes.lane_counts import LaneCounts
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.outputs import StepOutputs
from scheduler_svc.core.sequences.sequence import Sequence
from scheduler_svc.core.types import CUT_OFF, SequenceState
from scheduler_svc.metrics import buckets
from scheduler_svc.metrics.adapter_numbers import AdapterNumbers
from scheduler_svc.metrics.draft_gain import DraftGain


class LaneNumbers:
    """Counts and times of one executor's steps. They stay when the executor is removed."""

    def __init__(self, target: str, counts: LaneCounts) -> None:
        self.target = target
        self.counts = counts
        """The core's own, which outlive the lane."""
        self.num_prompt_tokens = 0
        """Prompt tokens computed, recomputed ones included."""
        self.num_sessions_ended = 0
        self.num_decodes = 0
        """Sequences of the decode batch that got tokens, one for each step."""
        self.num_decoded_tokens = 0
        """Tokens that they got: as many without drafts, up to one more than the drafts with them."""
        self.draft_gain = DraftGain()
        self.adapters = AdapterNumbers()
        self.step_s = Histogram(buckets.STEP_S)
        self.gap_s = Histogram(buckets.GAP_S)
        self.token_s = Histogram(buckets.TOKEN_S)
        self.step_tokens = Histogram(buckets.VLLM_STEP_TOKENS)
        self.step_sequences = Histogram(buckets.STEP_SEQUENCES)
        self.last_result_at = 0.0
        """When the last result was applied, in seconds on the clock; 0: none yet."""
        self.had_work = False
        """Whether the next step was due at once after the last result."""

    def on_applied(
        self, step: PlannedStep, result: StepResult, outputs: StepOutputs, now: float, stalled: dict[Sequence, float]
    ) -> None:
        """A step's result was applied.

        All sequences that decode got their last token with the last result, so a step adds one interval for all of
        them; the tokens that drafts gave one of them share it. `stalled` has the time of the last token of the others,
        which computed something else in between.
        """
        interval_s, self.last_result_at = now - self.last_result_at, now
        num_drafts = sum(result.num_drafts)
        num_decoded, num_tokens = len(outputs.sequences), len(step.decode_slots) + num_drafts
        for chunk in step.chunks:
            num_tokens += chunk.num_tokens
            left = chunk.sequence.num_prompt_tokens - chunk.context_len
            if left > 0:
                self.num_prompt_tokens += min(chunk.num_tokens, left)
            if chunk.samples and not chunk.sequence.is_beam:
                num_decoded -= self._took_token(chunk.sequence, now, now - interval_s, stalled)
        if num_decoded > 0:
            self._observe_decoded(result, outputs, num_decoded, interval_s)
        if stalled:
            # Preempted while this step ran: their last token came now.
            stalled.update((sequence, now) for sequence in outputs.sequences if sequence in stalled)
        step_s = result.timings.total_ns / 1e9
        if step.decode_slots and not step.chunks:
            seconds = (result.timings.total_ns - result.timings.moves_ns) / 1e9
            self.draft_gain.observe(len(step.decode_slots), num_drafts, max(0, num_decoded), seconds)
        self.step_s.observe(step_s)
        if self.had_work:
            self.gap_s.observe(max(0.0, interval_s - step_s))
        self.step_tokens.observe(num_tokens)
        self.step_sequences.observe(len(step.decode_slots) + len(step.chunks))

    def _observe_decoded(self, result: StepResult, outputs: StepOutputs, num_decoded: int, interval_s: float) -> None:
        """Sequences of the decode batch got tokens: c tokens of one step count as c intervals of a c-th each."""
        self.num_decoded_tokens += num_decoded
        if not any(result.num_accepted):
            self.num_decodes += num_decoded
            self.token_s.observe(interval_s, num_decoded)
            return
        by_count = Counter(Counter(outputs.sequences).values())
        # The rest got its one token outside the decode batch.
        by_count[1] -= len(outputs.sequences) - num_decoded
        for count, num_sequences in by_count.items():
            if num_sequences > 0:
                self.num_decodes += num_sequences
                self.token_s.observe(interval_s / count, count * num_sequences)

    def _took_token(self, sequence: Sequence, now: float, before: float, stalled: dict[Sequence, float]) -> bool:
        """Whether a sequence outside the decode batch has a new token; one that failed or was aborted has none.

        before: when the last result was applied.
        """
        since = stalled.pop(sequence, before)
        if sequence.finish is not None and sequence.finish.detail in CUT_OFF:
            return False
        known = sequence.group.spec.known_outputs
        if sequence.num_output_tokens > 1 + (len(known[sequence.sample_index]) if known else 0):
            self.token_s.observe(now - since)
        if sequence.state is SequenceState.WAITING:
            stalled[sequence] = now
        return True

    def copied(self) -> LaneNumbers:
        """The same numbers, which do not change any more."""
        result = copy(self)
        result.adapters = self.adapters.copied()
        result.counts, result.draft_gain = self.counts.copied(), self.draft_gain.copied()
        result.step_s, result.gap_s, result.token_s = self.step_s.copy(), self.gap_s.copy(), self.token_s.copy()
        result.step_tokens, result.step_sequences = self.step_tokens.copy(), self.step_sequences.copy()
        return result

    def add(self, other: LaneNumbers) -> None:
        """Add the numbers of an earlier lane of the same executor."""
        self.counts.add(other.counts)
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_sessions_ended += other.num_sessions_ended
        self.num_decodes += other.num_decodes
        self.num_decoded_tokens += other.num_decoded_tokens
        self.draft_gain.add(other.draft_gain)
        self.adapters.add(other.adapters)
        for mine, its in zip(self._histograms(), other._histograms(), strict=True):
            mine.add(its)

    def _histograms(self) -> tuple[Histogram, ...]:
        return self.step_s, self.gap_s, self.token_s, self.step_tokens, self.step_sequences
