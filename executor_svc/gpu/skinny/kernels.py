"""The GPU's operations, with layers that are fused in steps of few rows where the options say so."""

from __future__ import annotations

from collections.abc import Sequence

from executor_svc.gpu.skinny.layers import SkinnyLayers, fused
from executor_svc.gpu.skinny.recording import EitherKernels
from executor_svc.models.layers.fused import FusableLayer


class SkinnyKernels(EitherKernels):
    """Implements `models.layers.fused.FusingKernels`."""

    def fuse(self, layers: Sequence[FusableLayer]) -> SkinnyLayers | None:
        return None if self.skinny_gemms == "off" else fused(layers, self, self._num_sms)
