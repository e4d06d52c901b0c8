"""Launches attention of prompts with roles for warps, by the Gluon kernel or its twin; lists their variants."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from triton import knobs
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from executor_svc.gpu.kernels.attention.attention import heads_at_once
from executor_svc.gpu.kernels.attention.call import AttentionCall
from executor_svc.gpu.kernels.attention.config import AttentionKind
from executor_svc.gpu.kernels.attention.gluon.kernel import prompt_kernel
from executor_svc.gpu.kernels.attention.gluon.tiles import (
    ARCH,
    BLOCKS,
    TILES,
    PromptTiles,
    kind_of,
    tile_constants,
    tiles_of,
)
from executor_svc.gpu.kernels.attention.gluon.twin import prompt_twin
from executor_svc.gpu.kernels.attention.variants import name_of
from executor_svc.gpu.kernels.variant import Variant

_LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Of rows in shared memory, for products: 64 columns of 8 rows together."""
_WARPS = 4
"""Of the first consumer; the other and the producer have warps of their own."""


def prompt_attention(call: AttentionCall, tiles: PromptTiles | None = None, twin: bool | None = None) -> None:
    """Write `call.out`, for batches of any number of tokens; raises ValueError for what the kernel does not have.

    tiles: default: of `TILES`. twin: whether the twin runs; default: under Triton's interpreter.
    """
    call.check()
    kind = call.kind
    tiles = tiles or tiles_of(kind)
    twin = knobs.runtime.interpret if twin is None else twin
    if not call.num_seqs:
        return
    num_tiles = call.num_seqs + call.q.shape[0] // (tiles.rows // call.group)
    scale, softcap = call.factors()
    (prompt_twin if twin else prompt_kernel)[(num_tiles * call.num_kv_heads,)](
        call.q,
        call.kv_layer if twin else _descriptor(call),
        call.query_start_loc,
        call.seq_lens,
        call.block_tables,
        call.out,
        call.sinks,
        call.q.stride(0),
        call.block_tables.stride(0),
        call.num_seqs,
        num_tiles,
        call.num_kv_heads,
        call.block_rows,
        call.value_rows,
        heads_at_once(call),
        call.group,
        scale,
        softcap,
        **tile_constants(kind, tiles),
        num_warps=2 * _WARPS if twin else _WARPS,
        num_stages=1,
        enable_fp_fusion=True,
    )


def _descriptor(call: AttentionCall) -> TensorDescriptor:
    """Return the copy engine's view of the pool: all rows, a block of a KV head at a time."""
    size = call.head_size
    return TensorDescriptor(call.kv_layer, [call.num_rows, size], [size, 1], [call.block_size, size], _LAYOUT)


def variants() -> list[Variant]:
    """Return the variants of the kernel and of its twin compiled ahead of time."""
    found = []
    extras = (False, False), (True, False), (False, True)
    for head_size, dtype, (softcap, sinks) in product(TILES, (torch.bfloat16, torch.float16), extras):
        kinds = [kind_of(head_size, dtype, size, softcap=softcap, sinks=sinks) for size in BLOCKS]
        found.append(_variant(kinds[-1], twin=True))
        found += [_variant(kind, twin=False) for kind in (kinds[-1:] if softcap or sinks else kinds)]
    return found


def _variant(kind: AttentionKind, *, twin: bool) -> Variant:
    kernel: Any = prompt_twin if twin else prompt_kernel
    element = "bf16" if kind.dtype == torch.bfloat16 else "fp16"
    fixed = tile_constants(kind, TILES[kind.head_size]) | ({} if kind.sinks else {"sinks": None})
    types = {"q": f"*{element}", "out": f"*{element}", "sinks": "*fp32"}
    types["cache"] = f"tensordesc<{element}[{kind.block_size}, {kind.head_size}],{_LAYOUT!r}>"
    types |= {"cache": f"*{element}"} if twin else {}
    types |= dict.fromkeys(("query_start_loc", "seq_lens", "block_tables"), "*i32")
    types |= dict.fromkeys(("scale", "softcap"), "fp32")
    marks = name_of(kind).removesuffix(" copied")
    name = f"twin {marks}" if twin else f"gluon {marks} blocks of {kind.block_size} copied"
    return Variant(
        name=f"attention prompt {name}",
        kernel=kernel,
        signature={name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names},
        constants=fixed,
        divisible=("q", *(("cache",) if twin else ()), "out", "q_stride"),
        num_warps=2 * _WARPS if twin else _WARPS,
        num_stages=1,
        archs=(ARCH,),
        no_spills=True,
        wgmma=True,
        copies=not twin,
        roles=not twin,
        quick=name == "gluon 128 bf16 blocks of 16 copied",
    )
