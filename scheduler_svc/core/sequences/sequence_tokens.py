"""The tokens of a sequence, and how many of them are computed and planned.

A sequence has *confirmed* tokens, seen in a result, and *pending* ones, to be sampled by plans in flight. Steps
compute its KV until all of its tokens but the newest are covered; prefill, decode and recompute all follow this rule.
While it is in the decode batch, its counts follow from the batch's step counter. A step that may accept drafts counts
as one pending token, the least that it gives.

The prompt is one tuple for all sequences of a group; each has its own output only.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Protocol


class StepCounter(Protocol):
    """Counts steps; a sequence that follows it computes one token per step."""

    num_steps: int


class SequenceTokens:
    """A shared prompt, the output after it, and counts. Counts are in tokens, the prompt included."""

    __slots__ = (
        "_num_computed",
        "_num_planned",
        "_step_counter",
        "_step_offset",
        "num_prompt_tokens",
        "output_ids",
        "prompt_ids",
    )

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        """Start with a prompt, which is not copied, and without output."""
        self.prompt_ids = prompt_ids
        self.output_ids: list[int] = []
        """The confirmed output tokens. The list stays the same: results append to it."""
        self.num_prompt_tokens = self._num_planned = len(prompt_ids)
        self._num_computed = 0
        self._step_counter: StepCounter | None = None
        self._step_offset = 0

    @property
    def num_tokens(self) -> int:
        """Number of confirmed tokens."""
        return self.num_prompt_tokens + len(self.output_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of confirmed output tokens."""
        return len(self.output_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All confirmed tokens; copied if there is output. See `tokens` for a few of them."""
        return (*self.prompt_ids, *self.output_ids) if self.output_ids else self.prompt_ids

    def tokens(self, start: int, stop: int) -> Ids[int]:
        """The confirmed tokens `start` to `stop - 1`."""
        num_prompt = self.num_prompt_tokens
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : stop - num_prompt]
        return [*self.prompt_ids[start:], *self.output_ids[: stop - num_prompt]]

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is computed, or will be by plans in flight."""
        return self._num_computed if self._step_counter is None else self._step_counter.num_steps - self._step_offset

    @property
    def num_planned_tokens(self) -> int:
        """Number of confirmed and pending tokens."""
        return self._num_planned if self._step_counter is None else self._step_counter.num_steps - self._step_offset + 1

    @property
    def num_pending(self) -> int:
        """Number of tokens that plans in flight will sample."""
        counter, num_known = self._step_counter, self.num_prompt_tokens + len(self.output_ids)
        if counter is None:
            return self._num_planned - num_known
        return counter.num_steps - self._step_offset + 1 - num_known

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens whose KV no plan computes yet; 1 while it decodes."""
        return self._num_planned - self._num_computed if self._step_counter is None else 1

    @property
    def is_decoding(self) -> bool:
        """Whether it is in the decode batch and follows its step counter."""
        return self._step_counter is not None

    def mark_computed(self, num_tokens: int) -> None:
        """Count the KV of its first `num_tokens` tokens as computed: shared blocks have it, or will have it."""
        self._num_computed = num_tokens

    def fork(self, source: SequenceTokens) -> None:
        """Take over the counts of `source`: both sample from the same logits row in this step."""
        self._num_computed = source._num_computed
        self._num_planned = source._num_planned

    def set_output(self, output: Ids[int]) -> None:
        """Replace the output tokens; the KV of the last token is not computed yet."""
        self.output_ids[:] = output
        self._num_planned = self.num_tokens
        self._num_computed = self._num_planned - 1

    def append_output(self, token_id: int) -> None:
        """Append an output token, for a beam that continues; its KV is not computed yet."""
        self.output_ids.append(token_id)
        self._num_planned = self.num_tokens
        self._num_computed = self._num_planned - 1

    def attach_step_counter(self, counter: StepCounter) -> None:
        """Follow the decode batch's counter: one computed token per step."""
        self._step_offset = counter.num_steps - self._num_computed
        self._step_counter = counter

    def count_more(self, num_tokens: int) -> None:
        """Count tokens that drafts gave in addition to a step's one: known now, and computed where any KV is there.

        -1: the step gave none, and its last token counts as not computed.
        """
        if self._step_counter is not None:
            self._step_offset -= num_tokens
            return
        self._num_planned += num_tokens
        if self._num_computed:
            self._num_computed += num_tokens

    def detach_step_counter(self) -> None:
        """Stop following the counter and keep the counts."""
        if self._step_counter is not None:
            self._num_computed = num_computed = self._step_counter.num_steps - self._step_offset
            self._num_planned = num_computed + 1
            self._step_counter = None

    def drop_pending_tokens(self) -> None:
        """Drop pending tokens: plans in flight will not sample them."""
        self._num_planned = self.num_tokens
