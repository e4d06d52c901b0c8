"""Prompt logprobs for tests that only pass them on: made up, and no two rows alike."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza_common.plan.result import LogprobColumns


def made_up_prompt_logprobs(prompt: Sequence[int], num_top: int) -> LogprobColumns:
    """One row for each prompt token from the second on, exact in float32."""
    indices = range(1, len(prompt))
    return LogprobColumns(
        start=1,
        logprobs=[-index / 8 for index in indices],
        ranks=[1 + index % 90 for index in indices],
        num_top=num_top,
        top_token_ids=[(index + place) % 50 for index in indices for place in range(num_top)],
        top_logprobs=[-index / 8 - place for index in indices for place in range(num_top)],
    )
