"""The time to the first token of one request, and its answer."""

from __future__ import annotations

import time

from benchmarks.common.rows import BenchmarkError
from cadenza import AsyncClient, SamplingParams


async def first_token(client: AsyncClient, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Generate so many tokens; return the seconds to the first one, and the tokens. Raises BenchmarkError for fewer."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start, taken, tokens = time.perf_counter(), 0.0, list[int]()
    async for output in client.stream(prompt, params):
        tokens += output.outputs[0].token_ids
        taken = taken or time.perf_counter() - start
    if len(tokens) != num_tokens:
        raise BenchmarkError(f"a prompt of {len(prompt)} tokens was cut short")
    return taken, tokens
