"""Counts of tokens, and ends of choices, as OpenAI's APIs have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cadenza.outputs import CompletionOutput, RequestOutput


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """The usage object; cached_tokens: known at the end."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


def final_usage(
    results: Sequence[RequestOutput], *, num_hidden: int = 0, num_reasoning: int | None = None
) -> dict[str, Any]:
    """The usage of finished prompts; num_hidden: output tokens that no answer shows.

    num_reasoning: tokens of thoughts; None: they are not split off.
    """
    usage = usage_of(
        sum(prompt_tokens(each) for each in results),
        sum(completion_tokens(each) for each in results) - num_hidden,
        sum(each.num_cached_tokens or 0 for each in results),
    )
    if num_reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def prompt_tokens(result: RequestOutput) -> int:
    """Number of the prompt's tokens."""
    return len(result.prompt_token_ids or ()) if result.metrics is None else result.metrics.num_prompt_tokens


def completion_tokens(result: RequestOutput) -> int:
    """Number of output tokens; those of samples that best_of draws and does not return are among them."""
    if result.metrics is not None:
        return result.metrics.num_completion_tokens
    return sum(len(each.token_ids) for each in result.outputs)


def finish_of(sample: CompletionOutput) -> dict[str, Any]:
    """finish_reason, and vLLM's stop_reason."""
    return {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
