"""Counts of prompt tokens and of decoded tokens, from step records: for `cadenza top` and the live page."""

from __future__ import annotations

from cadenza.v1 import admin_pb2


class PromptCounter:
    """Separates the prompt tokens that steps compute from output tokens."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by sequence id

    def count(self, record: admin_pb2.StepRecord) -> tuple[int, list[int]]:
        """Prompt tokens of this step, including recomputed tokens, and the tokens of each sequence that got some
        without computing any.

        For a sequence that joined before the watch, a chunk of one token counts as output.
        """
        lengths = self._lengths
        lengths.update((join.sequence_id, join.num_prompt_tokens) for join in record.joined)
        columns = zip(record.sequence_ids, record.num_tokens, record.context_lens, record.num_sampled, strict=True)
        num_prompt_tokens, decoded = 0, []
        for sequence, num_tokens, context_len, num_sampled in columns:
            if num_tokens > 1 or context_len < lengths.get(sequence, 0):
                num_prompt_tokens += num_tokens
            elif num_tokens and num_sampled:
                decoded.append(num_sampled)
        for leave in record.left:
            lengths.pop(leave.sequence_id, None)
        return num_prompt_tokens, decoded
