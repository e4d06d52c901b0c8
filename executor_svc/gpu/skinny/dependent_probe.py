"""Whether fused layers whose kernels begin early give the same bits on the GPU at hand, and sooner: found at a start.

What an early kernel reads too soon is what was there before: so steps with other tokens and keys run in turn, and what
is wrong has other bits than it must have.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from executor_svc.gpu.kernels.dependent import LEAST_ARCH
from executor_svc.gpu.skinny.decodes import Measure, ProbedDecodes, Replay, by_graph, use
from executor_svc.gpu.skinny.recording import PROBED, EitherKernels

_log = logging.getLogger(__name__)

_WHAT = "programmatic dependent launches"
_VARIANTS = 2
"""Steps with tokens and keys of their own that run in turn."""
_ROUNDS = 8
"""In which each of them is compared, for each number of rows."""


@torch.inference_mode()
def probe_dependent(kernels: EitherKernels, decodes: ProbedDecodes, measure: Measure | None = None) -> None:
    """Let the kernels of fused layers begin early if this GPU then finds the same bits in less time; else say why not.

    kernels: that have recorded the model. measure: of what is enqueued; None: by graphs, on a GPU.
    """
    if kernels.pdl == "off" or (measure is None and decodes.hidden.device.type != "cuda"):
        return
    times = [0.0, 0.0]
    reason = _impossible(kernels, decodes) or _tried(kernels, decodes, measure or by_graph, times)
    if reason is None and times[1] >= times[0]:
        reason = f"they take {times[1] / times[0]:.2f} of the time"
    kernels.dependent = reason is None
    if reason is None:
        _log.info("%s: the same bits in %.2f of the time", _WHAT, times[1] / times[0])
    else:
        _log.warning("%s are not used: %s", _WHAT, reason)


def _impossible(kernels: EitherKernels, decodes: ProbedDecodes) -> str | None:
    if kernels.arch < LEAST_ARCH:
        return f"they need a GPU of compute capability 9.0, this has {kernels.arch / 10}"
    return None if decodes.choices(kernels) else "they are of fused layers, which this model or --skinny-gemms has not"


def _tried(kernels: EitherKernels, decodes: ProbedDecodes, measure: Measure, times: list[float]) -> str | None:
    """Return what `_compared` does, or why it failed; sizes of fused layers are as they were, and launches in order."""
    choices = decodes.choices(kernels)
    before = [choice.sizes for choice in choices]
    use(choices, PROBED)
    try:
        return kernels.checks.tried(_WHAT, "auto", lambda: _compared(kernels, decodes, measure, times))
    finally:
        decodes.clear()
        kernels.dependent = False
        for choice, sizes in zip(choices, before, strict=True):
            choice.sizes = sizes


def _compared(kernels: EitherKernels, decodes: ProbedDecodes, measure: Measure, times: list[float]) -> str | None:
    """Return what differs, if anything does; add the seconds of all decodes in order, and with early kernels."""
    for rows, run in decodes.each():
        kernels.dependent = False
        expected = [_bits(decodes, rows, variant, run) for variant in range(_VARIANTS)]
        times[0] += measure(run)[1]
        kernels.dependent = True
        found = [_bits(decodes, rows, variant, run) for variant in range(_VARIANTS)]
        replay, seconds = measure(run)
        times[1] += seconds
        for _ in range(_ROUNDS):
            found += [_bits(decodes, rows, variant, replay) for variant in range(_VARIANTS)]
        if not all(torch.equal(each, expected[index % _VARIANTS]) for index, each in enumerate(found)):
            return f"decodes of {rows} rows have other bits"
    return None if times[0] else "no block of keys and values is there to try them"


def _bits(decodes: ProbedDecodes, rows: int, variant: int, run: Replay) -> Tensor:
    """Return the bits of hidden states and of new keys and values of a step, none of which are there before it."""
    decodes.fill(rows, variant)
    hidden = decodes.hidden[:rows]
    hidden.fill_(float("nan"))
    run()
    return torch.cat([hidden, *decodes.new_keys(rows)], 1).view(torch.uint8)
