"""Whether fused layers compute the same on the GPU at hand, and sooner: measured at a start, by sizes of steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from executor_svc.gpu.skinny.decodes import Measure, ProbedDecodes, Replay, by_graph, use
from executor_svc.gpu.skinny.recording import PROBED, Either, EitherKernels

_log = logging.getLogger(__name__)

_MOST_ERROR = {torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Of hidden states behind all layers, beside those of the other way: relative, by the L2 norm of a row. Both round each
intermediate result, so they may differ by as much as two orders of summation do."""


@torch.inference_mode()
def probe_choices(kernels: EitherKernels, decodes: ProbedDecodes, measure: Measure | None = None) -> None:
    """Let decodes of a recorded model be computed by fused layers in the sizes in which this GPU is faster so.

    kernels: that have recorded the model. measure: of what is enqueued; None: by graphs, on a GPU.
    """
    choices = decodes.choices(kernels)
    if kernels.skinny_gemms != "auto" or not choices or (measure is None and decodes.hidden.device.type != "cuda"):
        return
    faster = []
    for rows, run in decodes.each():
        ratio = _ratio(choices, decodes.hidden[:rows], run, measure or by_graph)
        if ratio is None:
            _log.warning("steps of %d rows by fused layers have other results on this GPU", rows)
        else:
            _log.info("steps of %d rows by fused layers take %.2f of the time", rows, ratio)
        if ratio is not None and ratio < 1.0:
            faster.append(rows)
    decodes.clear()
    use(choices, faster)


def _ratio(choices: Sequence[Either], hidden: Tensor, run: Replay, measure: Measure) -> float | None:
    """Return the time of fused layers over that of others; None if their results are not the same."""
    results, times = [], []
    for sizes in ((), PROBED):
        use(choices, sizes)
        run()
        results.append(hidden.float())
        times.append(measure(run)[1])
    apart, fused = results
    error = (fused - apart).norm(dim=1) / apart.norm(dim=1)
    # Not for NaN, either.
    return times[1] / times[0] if bool((error <= _MOST_ERROR[hidden.dtype]).all()) else None
