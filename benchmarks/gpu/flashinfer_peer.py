"""FlashInfer's decode attention over paged keys and values: the peer of our kernel, where it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.benchmark import progress
from benchmarks.gpu.attention_runs import Sizes
from benchmarks.gpu.cases import NotHere, one_line

_WORKSPACE_BYTES = 256 << 20
"""Twice what FlashInfer recommends."""
_KINDS = {"cuda_cores": False, "tensor_cores": True}
"""A user chooses: CUDA cores are FlashInfer's default, tensor cores its advice for groups of four and more."""


class Peer:
    """FlashInfer's wrapper for batches of one token each, bf16."""

    def __init__(self, device: torch.device, tensor_cores: bool) -> None:
        """Raises what FlashInfer raises where it can not be had."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # HND: heads before a block's tokens, as in our cache.
        self._wrapper: Any = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)

    def launch(self, sizes: Sizes, q: Tensor, kv_layer: Tensor, tables: Tensor) -> tuple[Callable[[], None], Tensor]:
        """Plan the batch; returns what enqueues attention until the next plan, and the tensor [S, H, D] that it writes.

        q is [S, H, D], kv_layer [blocks, 2, heads, tokens of a block, D], tables [S, blocks] int32 on the host.
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
    """FlashInfer's kernels that run here, by name; one that does not is said. Raises NotHere if there is none."""
    try:
        importlib.import_module("flashinfer")
    except Exception as error:
        raise NotHere(f"no FlashInfer: {one_line(error)}") from error
    found, why = dict[str, Peer](), ""
    for name, tensor_cores in _KINDS.items():
        try:
            peer = Peer(device, tensor_cores)
            _try_out(peer, device)
            found[name] = peer
        except Exception as error:
            why = one_line(error)
            progress(f"  FlashInfer, {name}: {why}")
    if not found:
        raise NotHere(f"FlashInfer does not run here: {why}")
    return found


def _try_out(peer: Peer, device: torch.device) -> None:
    """Let a token see itself alone, in the shape of the cases: raises what goes wrong."""
    sizes = Sizes(1, 1)
    q = torch.ones(1, sizes.shape.num_heads, sizes.head_size, dtype=torch.bfloat16, device=device)
    block = torch.ones(1, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_size, dtype=torch.bfloat16, device=device)
    work, out = peer.launch(sizes, q, block, torch.zeros(1, 1, dtype=torch.int32))
    work()
    if not torch.equal(out, q):
        raise RuntimeError("attention to ones alone is not one")
