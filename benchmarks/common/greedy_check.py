"""Checks before timing that fp32 greedy tokens of Cadenza equal those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.burst_client import generate_burst, running_services
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request
from benchmarks.peers.transformers_static import load_model

TIE = 1e-4
"""Logits that differ by at most this are a tie in fp32: either token is right."""


def check_greedy(folder: Path, requests: Sequence[Request], **options: Any) -> int:
    """Run the requests through Cadenza in fp32 and compare each output token with transformers; returns their number.

    transformers gets the prompt with Cadenza's tokens in one pass; each token must have the highest logit, up to a tie,
    given the tokens before it. Without ties these are the tokens of its `generate`, and after a tie the rest is still
    compared. Raises BenchmarkError for a token that is not best.
    """
    with running_services(folder, **{**options, "dtype": "float32"}) as target:
        ours, _ = asyncio.run(generate_burst(target, requests))
    model = load_model(folder, "float32")
    for request, tokens in zip(requests, ours, strict=True):
        _compare(model, request, tokens)
    return sum(map(len, ours))


def _compare(model: Any, request: Request, tokens: Sequence[int]) -> None:
    ids = torch.tensor([[*request.prompt, *tokens[:-1]]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0].float()
    values, best = logits.max(dim=-1)
    behind = values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    # Not `behind > TIE`, which is false for NaN, too.
    wrong = (~(behind <= TIE)).nonzero()[:, 0].tolist()
    if wrong:
        index = wrong[0]
        raise BenchmarkError(
            f"request {request.request_id}, output token {index}: {tokens[index]} where transformers has "
            f"{int(best[index])}, whose logit is {float(behind[index]):.2g} above"
        )
