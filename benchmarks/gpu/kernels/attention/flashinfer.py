"""Decode attention in bf16 beside FlashInfer, where it is installed, on the same tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.benchmark import progress
from benchmarks.gpu.cases import Bench, Case, Group, Metrics, Unavailable, one_line
from benchmarks.gpu.kernels.attention.attention import decode_case, decode_sizes
from benchmarks.gpu.kernels.attention.attention_launch import Sizes, launch, make_inputs

_TOLERANCE = 0.02
"""Relative error of a head: both round weights and outputs to bf16."""


def cases(tiny: bool) -> Sequence[Case]:
    """The bf16 batches of the group `decode`."""
    return [decode_case(sizes, _time, 4.0) for sizes in decode_sizes(tiny) if not sizes.fp8]


def _time(bench: Bench, sizes: Sizes) -> Metrics:
    """Times of both; `ratio` is ours over FlashInfer's faster kernel. Raises RuntimeError if the results differ."""
    others = bench.cached("flashinfer", lambda: peers(bench.device))
    inputs = make_inputs(bench, sizes)
    work, out = launch(bench, sizes, inputs)
    work()
    ours, theirs = bench.clock.seconds(work), dict[str, float]()
    for name, peer in others.items():
        their_work, their_out = peer.launch(sizes, inputs.q, inputs.kv_layer, inputs.block_tables)
        their_work()
        check_equal(name, out.view(inputs.q.shape), their_out)
        theirs[name] = bench.clock.seconds(their_work)
    best = min(theirs.values())
    return {
        "us": 1e6 * ours,
        **{f"{name}_us": 1e6 * seconds for name, seconds in theirs.items()},
        "percent_of_copy": 100 * sizes.kv_bytes / ours / bench.ceilings.copy,
        "flashinfer_percent_of_copy": 100 * sizes.kv_bytes / best / bench.ceilings.copy,
        "ratio": ours / best,
    }


def check_equal(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Check that all heads [S, H, D] are equal up to rounding; raises RuntimeError with the worst head."""
    expected = ours.float()
    errors = (theirs.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    if not bool((errors < _TOLERANCE).all()):
        at = errors.nan_to_num(float("inf")).flatten().argmax().item()
        seq, head = divmod(int(at), errors.shape[1])
        raise RuntimeError(f"FlashInfer ({name}) differs: head {head} of sequence {seq} by {errors[seq, head]:.3g}")


GROUP = Group("flashinfer", "decode attention beside FlashInfer", cases, limit_s=120)


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
