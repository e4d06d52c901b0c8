"""`StepCosts` as a plain function of numbers, for loops of millions of steps: no object is made for a step."""

from __future__ import annotations

from collections.abc import Callable

from executor_svc.simulated.costs import StepCosts

StepCostFunction = Callable[[int, int, int, int, int], tuple[int, int, int]]


def step_cost_function(costs: StepCosts) -> StepCostFunction:
    """Returns a function of (tokens, context_tokens, kv_tokens, samples, moved_blocks), which mean the same as in
    `StepWork`.

    The function returns nanoseconds: (forward_ns, sample_ns, move_ns), as the methods of `StepCosts` do.
    """
    step_us, token_us, hidden_tokens = costs.step_us, costs.token_us, costs.hidden_tokens
    context_token_us, kv_token_us = costs.context_token_us, costs.kv_token_us
    sample_us, moved_block_us = costs.sample_us, costs.moved_block_us

    def price(
        tokens: int, context_tokens: int, kv_tokens: int, samples: int, moved_blocks: int
    ) -> tuple[int, int, int]:
        us = step_us + token_us * (tokens - hidden_tokens) if tokens > hidden_tokens else step_us
        us += context_token_us * context_tokens + kv_token_us * kv_tokens
        moves = round(1000 * moved_block_us * moved_blocks) if moved_blocks else 0
        return round(1000 * us), round(1000 * sample_us * samples), moves

    return price
