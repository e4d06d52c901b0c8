"""FlashInfer's decode attention over paged keys and values, the peer of our kernel, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.benchmark import progress
from benchmarks.gpu.common.attention_sizes import Sizes
from benchmarks.gpu.common.cases import Unavailable, one_line

_WORKSPACE_BYTES = 256 << 20
"""Twice what FlashInfer recommends."""
_USE_TENSOR_CORES = {"cuda_cores": False, "tensor_cores": True}
"""The user chooses: CUDA cores are FlashInfer's default, tensor cores its advice for groups of four and more."""


class Peer:
    """FlashInfer's wrapper for batches of one token per sequence, in bf16."""

    def __init__(self, device: torch.device, tensor_cores: bool) -> None:
        """Raises FlashInfer's error where it does not work."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # HND: heads before the tokens of a block, as in our cache.
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)

    def launch(self, sizes: Sizes, q: Tensor, kv_layer: Tensor, tables: Tensor) -> tuple[Callable[[], None], Tensor]:
        """Plan the batch; returns a function that enqueues attention, valid until the next plan, and its output.

        q and the output are [S, H, D], kv_layer is [blocks, 2, heads, block size, D], tables is [S, blocks] int32
        on the host.
        """
        shape, out = sizes.shape, torch.empty(q.shape, dtype=q.dtype, device=q.device)
        last_page = (sizes.context - 1) % sizes.block_size + 1
        self._wrapper.plan(
            torch.arange(sizes.batch + 1, dtype=torch.int32) * sizes.blocks_per_seq,
            tables.flatten().to(q.device),
            torch.full((sizes.batch,), last_page, dtype=torch.int32),
            shape.num_heads,
            shape.num_kv_heads,
            sizes.head_size,
            sizes.block_size,
            q_data_type=q.dtype,
            kv_data_type=kv_layer.dtype,
            sm_scale=shape.scale,
        )
        return lambda: self._wrapper.run(q, kv_layer, out=out), out


def peers(device: torch.device) -> dict[str, Peer]:
    """FlashInfer's kernels that work here, by name; reports those that do not. Raises Unavailable if none does."""
    try:
        importlib.import_module("flashinfer")
    except Exception as error:
        raise Unavailable(f"no FlashInfer: {one_line(error)}") from error
    found, reason = dict[str, Peer](), ""
    for name, tensor_cores in _USE_TENSOR_CORES.items():
        try:
            peer = Peer(device, tensor_cores)
            _check(peer, device)
            found[name] = peer
        except Exception as error:
            reason = one_line(error)
            progress(f"  FlashInfer, {name}: {reason}")
    if not found:
        raise Unavailable(f"FlashInfer does not run here: {reason}")
    return found


def _check(peer: Peer, device: torch.device) -> None:
    """Run one token that sees only itself, in the shape of the cases; raises any error."""
    sizes = Sizes(1, 1)
    q = torch.ones(1, sizes.shape.num_heads, sizes.head_size, dtype=torch.bfloat16, device=device)
    block = torch.ones(1, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_size, dtype=torch.bfloat16, device=device)
    work, out = peer.launch(sizes, q, block, torch.zeros(1, 1, dtype=torch.int32))
    work()
    if not torch.equal(out, q):
        raise RuntimeError("attention to ones alone is not one")
