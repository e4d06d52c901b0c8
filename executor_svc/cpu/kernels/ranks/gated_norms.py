"""The gated norm of groups of which each rank has a part: their squares are summed by row, and over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host
from executor_svc.cpu.kernels.states.gated_norm import GatedNorm, gated_norm, gated_squares
from executor_svc.device.ranks import RankKernels
from executor_svc.device.states import GatedNormKind

_FLOAT = 4


def norm_groups(
    host: Host,
    ranks: RankKernels,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    groups: int,
    kind: GatedNormKind,
) -> Tensor:
    """As `device.ranks.GatedNormRanks.norm_groups`.

    Each rank gives a sum for every group, 0 for those that it has no part of.
    """
    rows, width = x.shape
    share, dtype = ranks.share, DTYPES[x.dtype]
    assert share.size % groups == 0
    norm = GatedNorm(kind, width, width, False, eps, share.size // groups)
    own = share.rank * groups // share.size
    sums = host.new("gated squares", (rows, groups), torch.float32)
    inputs = tuple(each for rows_of in (x, gate) for each in (rows_of.data_ptr(), rows_of.stride(0) * x.element_size()))
    kernel = gated_squares(host.code, dtype, norm, groups, own)
    host.launch(KernelLaunch(kernel, "rows", 1, 1, (*inputs, sums.data_ptr())), rows)
    of_all = ranks.sum_partials(sums, None, torch.float32, "squares")
    y = host.new("gated", (rows, width), x.dtype)
    kernel = gated_norm(host.code, dtype, DTYPES[weight.dtype], norm)
    arguments = (*inputs, weight.data_ptr(), y.data_ptr(), of_all.data_ptr() + own * _FLOAT, groups * _FLOAT)
    host.launch(KernelLaunch(kernel, "rows", 1, 1, arguments), rows)
    return y
