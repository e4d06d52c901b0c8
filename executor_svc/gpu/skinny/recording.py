"""Two ways to compute the same, recorded side by side: which one runs is decided at each run, by the step's sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor

from executor_svc.gpu.choices.ways import KernelChecks
from executor_svc.gpu.kernels.exact.attention_probe import ExactAttention
from executor_svc.gpu.kernels.gpu_kernels import Operation
from executor_svc.gpu.states import GpuStateKernels

SkinnyGemms = Literal["off", "auto", "on"]
"""Whether steps of few rows are computed by fused layers; auto: where a start has found them right, and faster."""
Pdl = Literal["off", "auto"]
"""Whether their kernels begin before the ones before them end; auto: if a start has found the same bits, and sooner."""


PROBED = (1, 2, 4, 8, 16)
"""Rows of the steps that a start compares, and measures; others count as the next of these."""


class Either:
    """A recorded choice between operations that leave the same result in the same memory."""

    def __init__(
        self,
        result: Tensor,
        fits: Callable[[int], bool],
        fused: Sequence[Operation],
        apart: Sequence[Operation],
        sizes: Collection[int],
        what: str,
    ) -> None:
        """fits: whether the fused ones can compute a step of n rows, whose sizes the plans hold.

        sizes: those of `PROBED` that they do compute. what: all that their kernels depend on, as text.
        """
        self.result, self.sizes, self.what = result, sizes, what
        self._fits, self._fused, self._apart = fits, tuple(fused), tuple(apart)

    def __call__(self, n: int) -> None:
        """Enqueue one of both, on the first n rows."""
        fused = next((size for size in PROBED if n <= size), 0) in self.sizes and self._fits(n)
        for operation in self._fused if fused else self._apart:
            operation(n)


class EitherKernels(GpuStateKernels):
    """The GPU's operations, with choices between two ways of computing them."""

    def __init__(
        self,
        device: torch.device,
        arch: int,
        num_sms: int,
        exact: ExactAttention | None = None,
        skinny_gemms: SkinnyGemms = "off",
        pdl: Pdl = "off",
        checks: KernelChecks | None = None,
    ) -> None:
        """As of `GpuKernels`."""
        super().__init__(device, arch, num_sms, exact)
        self.skinny_gemms: SkinnyGemms = "off" if exact is not None else skinny_gemms
        if self.skinny_gemms != "off":
            self.name = f"{self.name} skinny-1 {self.skinny_gemms}"
        self.pdl = pdl
        self.checks = checks or KernelChecks(device)
        """Of the start, which remembers what has ended a process."""
        self.dependent = False
        """Whether fused layers launch dependent kernels from now on: see `kernels.dependent`. Bits are the same."""
        self.choices: WeakSet[Either] = WeakSet()
        """Those that are recorded and in use."""
        self._only_apart = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, no operations are fused: each is run or recorded by itself."""
        before, self._only_apart = self._only_apart, True
        try:
            yield
        finally:
            self._only_apart = before

    def either(
        self,
        result: Tensor,
        fits: Callable[[int], bool],
        fused: Callable[[], None],
        apart: Callable[[], Tensor],
        what: str,
    ) -> Tensor:
        """Run one of two ways, or record both; each leaves its result in the memory of `result`.

        what: as of `Either`.
        """
        if self._only_apart:
            _same(apart(), result)
            return result
        if self._recording is None:
            if self.skinny_gemms == "on" and fits(len(result)):
                fused()
            else:
                _same(apart(), result)
            return result
        both = self._recorded(fused), self._recorded(lambda: _same(apart(), result))
        choice = Either(result, fits, *both, PROBED if self.skinny_gemms == "on" else (), what)
        self.choices.add(choice)
        return self.run(result, choice)

    def _recorded(self, record: Callable[[], None]) -> list[Operation]:
        """Return the operations that are recorded meanwhile, which are on the same rows."""
        recording = self._recording
        assert recording is not None
        before, recording.operations = recording.operations, []
        try:
            record()
            found = recording.operations
        finally:
            recording.operations = before
        assert {name for name, _ in found} <= {recording.rows}
        return [operation for _, operation in found]


def _same(found: Tensor, result: Tensor) -> None:
    assert found.data_ptr() == result.data_ptr()
