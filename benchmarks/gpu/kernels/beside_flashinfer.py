"""Decode attention in bf16 beside FlashInfer on the same tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from benchmarks.gpu.common.attention_sizes import Sizes
from benchmarks.gpu.common.cases import Bench, Case, Group, Metrics
from benchmarks.gpu.kernels.attention import decode_case, decode_sizes
from benchmarks.gpu.kernels.attention_launch import launch, make_inputs

_TOLERANCE = 0.02
"""Relative error of a head: both round weights and outputs to bf16."""


def cases(tiny: bool) -> Sequence[Case]:
    """The bf16 batches of the group `decode`."""
    return [decode_case(sizes, _time, 4.0) for sizes in decode_sizes(tiny) if not sizes.fp8]


def _time(bench: Bench, sizes: Sizes) -> Metrics:
    """Times of both; `ratio` is ours over FlashInfer's faster kernel. Raises RuntimeError if the results differ."""
    from benchmarks.gpu.peers.flashinfer import peers

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
