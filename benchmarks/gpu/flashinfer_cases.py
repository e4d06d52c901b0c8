"""Decode attention beside FlashInfer's on the same tensors, bf16."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from benchmarks.gpu.attention_cases import decode_case, decode_sizes
from benchmarks.gpu.attention_runs import Sizes, launch, make_inputs
from benchmarks.gpu.cases import Bench, Case, Group, Metrics

_TOLERANCE = 0.02
"""Of a head's length: either rounds to bf16 what it weights with and what it writes."""


def cases(tiny: bool) -> Sequence[Case]:
    """The batches of the group `decode` in bf16."""
    return [decode_case(sizes, _time, 4.0) for sizes in decode_sizes(tiny) if not sizes.fp8]


def _time(bench: Bench, sizes: Sizes) -> Metrics:
    """Times of both; `ratio` is ours over the faster of FlashInfer's kernels. Raises RuntimeError if they differ."""
    from benchmarks.gpu.flashinfer_peer import peers

    others = bench.keep("flashinfer", lambda: peers(bench.device))
    inputs = make_inputs(bench, sizes)
    work, out = launch(bench, sizes, inputs)
    work()
    ours, theirs = bench.clock.seconds(work), dict[str, float]()
    for name, peer in others.items():
        their_work, their_out = peer.launch(sizes, inputs.q, inputs.kv_layer, inputs.block_tables)
        their_work()
        check_alike(name, out.view(inputs.q.shape), their_out)
        theirs[name] = bench.clock.seconds(their_work)
    best = min(theirs.values())
    return {
        "us": 1e6 * ours,
        **{f"{name}_us": 1e6 * seconds for name, seconds in theirs.items()},
        "percent_of_copy": 100 * sizes.kv_bytes / ours / bench.ceilings.copy,
        "flashinfer_percent_of_copy": 100 * sizes.kv_bytes / best / bench.ceilings.copy,
        "ratio": ours / best,
    }


def check_alike(name: str, ours: Tensor, theirs: Tensor) -> None:
    """See that every head [S, H, D] of both is the same but for rounding; raises RuntimeError."""
    wanted = ours.float()
    errors = (theirs.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    if not bool((errors < _TOLERANCE).all()):
        at = errors.nan_to_num(float("inf")).flatten().argmax().item()
        seq, head = divmod(int(at), errors.shape[1])
        raise RuntimeError(f"FlashInfer ({name}) differs: head {head} of sequence {seq} by {errors[seq, head]:.3g}")


GROUP = Group("flashinfer", "decode attention beside FlashInfer", cases, limit_s=120)
