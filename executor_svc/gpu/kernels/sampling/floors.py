"""Floors of drawn rows: the least scaled logit that is kept. The meaning is that of `sampling.floors`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.sampling.arithmetic import as_float
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, SamplingState, SamplingWorkspace, field
from executor_svc.gpu.kernels.variant import Variant

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_HAS_FLOOR = tl.constexpr(field("has_floor"))
_LOG_MIN_P = tl.constexpr(field("log_min_p"))


@triton.jit
def row_floor(record, floors, row):
    """The floor of a row, -inf if it has none."""
    return tl.load(floors + row, tl.load(record + _HAS_FLOOR) != 0, other=float("-inf"))


@triton.jit
def _floors(rows, records, floors):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot >= 0:
        record = records + slot * _RECORD_WORDS
        tl.store(floors + row, as_float(record + _LOG_MIN_P), tl.load(record + _HAS_FLOOR) != 0)


def find_floors(
    logits: Tensor, rows: Tensor, sources: Tensor, state: SamplingState, workspace: SamplingWorkspace, *, edited: bool
) -> None:
    """Write the floors of rows that have one to `workspace.floors`; arguments as `sampling.sample` has them."""
    _floors[(rows.shape[0],)](rows, state.records, workspace.floors, num_warps=1)


def variants() -> list[Variant]:
    """Return the configuration compiled ahead of time."""
    pointers = {"rows": "*i32", "records": "*i32", "floors": "*fp32"}
    return [
        Variant(
            name="floors", kernel=_floors, signature=pointers, constants={}, divisible=tuple(pointers), num_warps=1,
            no_spills=True, quick=True,
        )
    ]  # fmt: skip
