"""The norm of all heads together where each rank has some: their squares are summed by row, and over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.cpu.kernels.codegen.compiled import Code
from executor_svc.cpu.kernels.codegen.emit import ITEM_BYTES, Dtype, Emitter, Int
from executor_svc.cpu.kernels.codegen.team import KernelLaunch
from executor_svc.cpu.kernels.dense_launches import DTYPES, Host
from executor_svc.cpu.kernels.norm import normalize, sum_of_squares
from executor_svc.device.kernels import AttentionShape, HeadNorms
from executor_svc.device.ranks import RankKernels

_FLOAT = 4


def head_squares(code: Code, dtype: Dtype, heads: tuple[int, int, int], padded: int) -> str:
    """Add the kernel of the sums of squares of all query heads, and of all key heads; returns its name.

    Items: one for each row. Arguments: rows, qkv [rows, heads * padded], sums [rows, 2] float32.
    """
    num_q, num_k, _ = heads
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, qkv: Int, sums: Int) -> None:
        start = qkv + item * (sum(heads) * padded * size)
        for which, (first, count) in enumerate(((0, num_q), (num_q, num_k))):
            found = sum_of_squares(emit, start + first * padded * size, dtype, count * padded)
            emit.store(found, sums + item * (2 * _FLOAT) + which * _FLOAT, "float32", 1)

    return code.kernel(f"head_squares_{dtype}_{heads}_{padded}", 3, body)


def norm_by_squares(
    code: Code, dtype: Dtype, weight_dtype: Dtype, heads: tuple[int, int, int], of_all: float, padded: int, eps: float
) -> str:
    """Add the kernel that normalizes query heads together, and key heads, in place; returns its name.

    of_all: by how much more numbers there are on all ranks, padding of heads left out. Items: one for each row.
    Arguments: rows, qkv [rows, heads * padded], q_weight [queries * padded], k_weight [keys * padded], sums [rows, 2]
    float32 of all ranks.
    """
    num_q, num_k, _ = heads
    size = ITEM_BYTES[dtype]

    def body(emit: Emitter, item: Int, _: Int, __: Int, qkv: Int, q_weight: Int, k_weight: Int, sums: Int) -> None:
        start = qkv + item * (sum(heads) * padded * size)
        for which, (first, count, weight) in enumerate(((0, num_q, q_weight), (num_q, num_k, k_weight))):
            at = start + first * padded * size
            squares = emit.load_all(sums + item * (2 * _FLOAT) + which * _FLOAT, "float32")
            mean = squares / (count * of_all)
            normalize(emit, at, at, weight, dtype, weight_dtype, count * padded, eps, mean=mean)

    return code.kernel(f"norm_by_squares_{dtype}_{weight_dtype}_{heads}_{of_all}_{padded}_{eps}", 5, body)


def norm_all_heads(host: Host, ranks: RankKernels, qkv: Tensor, norms: HeadNorms, shape: AttentionShape) -> Tensor:
    """As `device.ranks.HeadNormRanks.norm_all_heads`.

    A key head that several ranks have counts as often in the sum as in the number of what is summed.
    """
    heads, padded = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), shape.padded_head_size
    dtype, rows = DTYPES[qkv.dtype], len(qkv)
    own = host.new("head squares", (rows, 2), torch.float32)
    kernel = head_squares(host.code, dtype, heads, padded)
    host.launch(KernelLaunch(kernel, "rows", 1, 1, (qkv.data_ptr(), own.data_ptr())), rows)
    sums = ranks.sum_partials(own, None, torch.float32)
    of_all = float(shape.head_size * ranks.share.size)
    kernel = norm_by_squares(host.code, dtype, DTYPES[norms.q.dtype], heads, of_all, padded, norms.eps)
    arguments = tuple(each.data_ptr() for each in (qkv, norms.q, norms.k, sums))
    host.launch(KernelLaunch(kernel, "rows", 1, 1, arguments), rows)
    return qkv
