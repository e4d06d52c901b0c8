"""How many experts of a layer a step reads, by its number of rows: counted from what the model's routers choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.forward_step import make_runner, step_batch
from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels, CpuRoutes
from executor_svc.device.experts import Router

_CONTEXT = 96
"""So that 64 sequences fit into the blocks that `make_runner` has."""
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PROMPT = 128
_PROMPTS = 4


def experts_touched(model: Path, num_threads: int | None, isa: str | None, more: Mapping[str, Any]) -> dict[int, float]:
    """Return the number of experts that a step reads in a layer, the mean of the layers, by its rows.

    Steps of one token of each sequence, and one of prompts; the tokens are those of `step_batch`, and
    the other arguments those of `make_runner`.
    """
    kept: list[Tensor] = []
    new_routes = CpuExpertKernels._new_routes

    def kept_routes(kernels: CpuExpertKernels, num_rows: int, router: Router) -> CpuRoutes:
        routes = new_routes(kernels, num_rows, router)
        kept.append(torch.zeros_like(routes.ids))  # the layers' own are in the same memory
        return replace(routes, ids=kept[-1])

    with patch.object(CpuExpertKernels, "_new_routes", kept_routes):
        loaded = make_runner(model, num_threads, isa=isa, more=more)
    found = {}
    steps: list[Sequence[tuple[int, int]]] = [[(_CONTEXT, 1)] * rows for rows in _ROWS]
    for chunks in [*steps, [(0, _PROMPT)] * _PROMPTS]:
        loaded.runner.forward(step_batch(chunks, loaded.layout))
        rows = sum(count for _, count in chunks)
        found[rows] = sum(len(ids[:rows].unique()) for ids in kept) / len(kept)
    return found
