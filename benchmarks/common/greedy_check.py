"""Is it the same model? fp32 greedy tokens of Cadenza against transformers', before anything is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.burst_client import generate_burst, running_services
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.static_batches import generate_batch, load_model, two_best_logits
from benchmarks.common.workload import Request

TIE = 1e-4
"""Logits within this of each other are a tie in fp32: either token is right, and what follows cannot be compared."""
NUM_REQUESTS = 4
MAX_TOKENS = 64


def check_greedy(folder: Path, requests: Sequence[Request], **options: Any) -> int:
    """Run the first requests through both, in fp32; the number of tokens that were compared.

    Raises BenchmarkError where the tokens part without a tie.
    """
    few = [replace(each, output_len=min(each.output_len, MAX_TOKENS)) for each in requests[:NUM_REQUESTS]]
    with running_services(folder, **{**options, "dtype": "float32"}) as target:
        ours, _ = asyncio.run(generate_burst(target, few))
    model = load_model(folder, "float32")
    return sum(_compare(model, request, tokens) for request, tokens in zip(few, ours, strict=True))


def _compare(model: Any, request: Request, ours: Sequence[int]) -> int:
    (theirs,) = generate_batch(model, [request])
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        if own == other:
            continue
        values, ids = two_best_logits(model, [*request.prompt, *theirs[:index]])
        if values[0] - values[1] > TIE or own not in ids:
            raise BenchmarkError(
                f"request {request.request_id}, output token {index}: {own} where transformers has {other}; "
                f"its best logits are {values} of tokens {ids}"
            )
        return index
    return len(theirs)
