"""Whether fused layers compute the same on the GPU at hand, and sooner: found at a start, by sizes of steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.gpu.choices.ways import KernelCheck, Way
from executor_svc.gpu.skinny.decodes import Measure, ProbedDecodes, Replay, by_graph, use
from executor_svc.gpu.skinny.recording import PROBED, Either, EitherKernels

_log = logging.getLogger(__name__)

_MOST_ERROR = {torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Of a row of hidden states behind all layers, and of each layer's new keys and values, beside those of the other way:
relative, by the L2 norm of a row. Both round each intermediate result, so they may differ by as much as two orders of
summation do."""
_FUSED = "fused"


@dataclass(frozen=True, slots=True)
class RowAgreement:
    """Compares rows of several parts side by side. Implements `choices.ways.Agreement`."""

    widths: tuple[int, ...]
    """Columns of hidden states, then of each layer's new keys and values."""
    most: float
    """The error of a part of a row, by its L2 norm."""

    def reason_against(self, found: Tensor, expected: Tensor) -> str | None:
        """As in `Agreement`."""
        pairs = zip(found.split(self.widths, 1), expected.split(self.widths, 1), strict=True)
        for index, (have, want) in enumerate(pairs):
            error = (have - want).norm(dim=1) / want.norm(dim=1)
            # Not for NaN, either.
            if not bool((error <= self.most).all()):
                what = f"new keys and values of layer {index - 1}" if index else "hidden states"
                return f"{what}: a row is off by {float(error.max()):.3g} of its size, {self.most:.3g} is allowed"
        return None


@torch.inference_mode()
def probe_choices(kernels: EitherKernels, decodes: ProbedDecodes, measure: Measure | None = None) -> None:
    """Let decodes of a recorded model be computed by fused layers in the sizes in which this GPU is faster so.

    kernels: that have recorded the model. measure: of what is enqueued; None: by graphs, on a GPU.
    """
    choices = decodes.choices(kernels)
    if kernels.skinny_gemms != "auto" or not choices or not (measure is not None or _is_here(decodes)):
        return
    faster = []
    for rows, run in decodes.each():
        ratio = _ratio(choices, decodes, rows, run, measure or by_graph)
        if ratio is None:
            _log.warning("steps of %d rows by fused layers have other results on this GPU", rows)
        else:
            _log.info("steps of %d rows by fused layers take %.2f of the time", rows, ratio)
        if ratio is not None and ratio < 1.0:
            faster.append(rows)
    decodes.clear()
    use(choices, faster)


@torch.inference_mode()
def compare_fused(kernels: EitherKernels, decodes: ProbedDecodes) -> None:
    """Compare the fused layers that --skinny-gemms on has decodes of a recorded model computed by, on a GPU.

    Raises KernelError, naming the number of rows, where they are off; with --kernel-checks report that is logged.
    """
    choices, checks = decodes.choices(kernels), kernels.checks
    if kernels.skinny_gemms != "on" or not choices or not checks.compares or not _is_here(decodes):
        return
    agreement, right, early = _agreement(decodes), list[str](), ", begun early" if kernels.dependent else ""
    what = " and ".join(sorted({choice.what for choice in choices}))
    for rows, run in decodes.each():
        name = (
            f"--skinny-gemms on: fused layers ({what}; {decodes.length_of(rows)} tokens in blocks of "
            f"{decodes.block_size}{early}), steps of {rows} rows"
        )
        results = partial(_results, choices, decodes, rows, run)
        kept = len(checks.kept)
        checks.choose(KernelCheck(name, [Way(_FUSED, partial(results, PROBED))], partial(results, ()), agreement))
        if len(checks.kept) == kept:
            right.append(str(rows))
        for line in checks.kept[kept:]:
            _log.warning("NOT RIGHT on this GPU, and computed all the same (--kernel-checks report): %s", line)
    decodes.clear()
    use(choices, PROBED)
    if right:
        _log.info("steps of %s rows by fused layers agree with layers apart", ", ".join(right))


def _is_here(decodes: ProbedDecodes) -> bool:
    """Return whether kernels run on a GPU: what decides here is not for the interpreter."""
    return decodes.hidden.device.type == "cuda"


def _agreement(decodes: ProbedDecodes) -> RowAgreement:
    widths = decodes.hidden.shape[1], *(each.shape[1] for each in decodes.new_keys(1))
    return RowAgreement(widths, _MOST_ERROR[decodes.hidden.dtype])


def _results(choices: Sequence[Either], decodes: ProbedDecodes, rows: int, run: Replay, sizes: Sequence[int]) -> Tensor:
    """Return hidden states, and new keys and values [rows, all columns] float32; fused layers compute these sizes."""
    use(choices, sizes)
    decodes.fill(rows)  # what the other way has written is gone
    decodes.hidden[:rows].fill_(float("nan"))
    run()
    return torch.cat([decodes.hidden[:rows], *decodes.new_keys(rows)], 1).float()


def _ratio(choices: Sequence[Either], decodes: ProbedDecodes, rows: int, run: Replay, measure: Measure) -> float | None:
    """Return the time of fused layers over that of others; None if their results are not the same."""
    results, times = [], []
    for sizes in ((), PROBED):
        results.append(_results(choices, decodes, rows, run, sizes))
        times.append(measure(run)[1])
    return None if _agreement(decodes).reason_against(results[1], results[0]) else times[1] / times[0]
