"""Whether a new request can run at all."""

from __future__ import annotations

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.placement.candidates import check_fits_one, count_field
from scheduler_svc.core.steps.budget import MAX_ADMITTED_VALUES, MAX_GROUP_TOKENS
from scheduler_svc.core.types import ExecutorSpec, RequestSpec


def check_fits(spec: RequestSpec, executors: list[ExecutorSpec], count: int) -> None:
    """Reject a request of `count` sequences that no executor can hold; the message has the numbers."""
    num_prompt = len(spec.prompt_token_ids)
    if not num_prompt:
        raise RequestRejectedError("prompt", "the prompt has no tokens")
    check_fits_one(spec, executors, count)
    if count == 1:
        return
    if count * num_prompt > MAX_GROUP_TOKENS:
        raise RequestRejectedError(
            count_field(spec),
            f"{count} sequences of {num_prompt} prompt tokens have over {MAX_GROUP_TOKENS} tokens in all",
        )
    # Sequences after the first take the prompt from its slot.
    if num_prompt + count * spec.sampling.num_listed > MAX_ADMITTED_VALUES:
        raise RequestRejectedError(
            count_field(spec),
            f"{num_prompt} prompt tokens and {count} sequences with {spec.sampling.num_listed} numbers each in "
            f"their sampling parameters exceed {MAX_ADMITTED_VALUES} numbers in a plan",
        )
