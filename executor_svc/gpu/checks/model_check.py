"""Compares a model's operations with their references on the GPU at hand, before anything is served.

Small steps are run operation by operation. What is not right falls back, and the steps are run again with what took its
place, until all is right or something has no other way.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers
from executor_svc.gpu.checks.fallbacks import Fallbacks
from executor_svc.gpu.checks.model_steps import LONG, ModelSteps
from executor_svc.gpu.checks.operations import RecordedCall, noted
from executor_svc.gpu.choices.ways import KernelChecks, Tolerance
from executor_svc.gpu.kernels.gpu_kernels import GpuRecording
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.models.decoder import Decoder
from executor_svc.models.loading import LoadedModel

_LOOSE = Tolerance(math.inf, 0.05)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A call whose results are not right."""

    call: RecordedCall
    reason: str


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The comparison of one model."""

    loaded: LoadedModel
    device: Device
    config: ExecutorConfig
    checks: KernelChecks
    draft: DraftLayers | None = None
    """Layers of a draft model or head in the same cache."""
    draft_model: Decoder | None = None
    """The model to compare, in place of `loaded`'s, over the draft layers."""
    long: int = LONG
    """Tokens of the longer prompt."""

    @torch.inference_mode()
    def run(self, fallbacks: Fallbacks) -> None:
        """Compare, unless an earlier start has, and let fall back what is not right. Raises KernelError."""
        kernels, key = self.device.kernels, self._key()
        assert isinstance(kernels, GpuStateKernels)
        known = self.checks.store.known(key)
        if known is None:
            self._compare(kernels, fallbacks, key)
        else:
            fallbacks.adopt(known["ways"], known["reasons"])
            self.checks.num_known += known["compared"]

    def _compare(self, kernels: GpuStateKernels, fallbacks: Fallbacks, key: str) -> None:
        while True:
            before, began = self.checks.num_compared, time.monotonic()
            with kernels.passing():
                failures = self._failures(kernels, fallbacks)
            if not failures:
                break
            for failure in failures.values():
                fallbacks.fall_back(failure.call, failure.reason)
        self.checks.store.keep(key, {
            "ways": fallbacks.ways, "reasons": fallbacks.reasons, "compared": self.checks.num_compared - before,
            "seconds": round(time.monotonic() - began, 2),
        })  # fmt: skip

    def _failures(self, kernels: GpuStateKernels, fallbacks: Fallbacks) -> dict[str, _Failure]:
        """Run all steps; returns the first failure of each label."""
        with noted(kernels) as calls:
            steps = ModelSteps.of(self.loaded, self.device, self.config, self.draft, self.draft_model, self.long)
        # Of the steps; after it the same operations make logits that are requested later.
        recording = calls[0].recording
        own = {call.operations.start: call for call in calls if call.recording is recording}
        failures: dict[str, _Failure] = {}
        for _, chunks in steps.steps():
            counts, seen, index = steps.fill(chunks), set[str](), 0
            while index < len(recording.operations):
                call = own.get(index)
                if call is None or not counts[call.rows] or (call.label in seen and call.label not in failures):
                    _run(recording, index, counts)
                    index += 1
                    continue
                seen.add(call.label)
                reason = self._reason_against(call, counts, fallbacks, runs=call.label not in failures)
                if reason is not None:
                    failures.setdefault(call.label, _Failure(call, reason))
                index = call.operations.stop
        return failures

    def _reason_against(
        self, call: RecordedCall, counts: Mapping[str, int], fallbacks: Fallbacks, runs: bool
    ) -> str | None:
        """Run a call and compare it; what is not right, or is not to run again, is replaced by what is expected.

        So what comes after it is compared for itself.
        """
        n = counts[call.rows]
        expected = call.meaning.expected(call.values, n, _at_host)

        def compare() -> str | None:
            for index in call.operations:
                _run(call.recording, index, counts)
            found = call.meaning.found(call.values, call.result, n)
            return next(filter(None, map(partial(_reason, call), found, expected)), None)

        reason = self.checks.tried(call.label, fallbacks.way_of(call.label), compare) if runs else None
        if reason is not None or not runs:
            for found, value in zip(call.meaning.found(call.values, call.result, n), expected, strict=True):
                found.copy_(value.float())
        return reason

    def _key(self) -> str:
        """Return a key: models with the same key launch the same kernels."""
        loaded, config = self.loaded, self.config
        parts = (
            loaded.spec_digest.hex(), loaded.geometry, self.device.isa, self.device.numerics, self.device.kv_dtype,
            self.device.few_bits.forms, config.block_size, loaded.ranks is None, self.long,
            None if self.draft_model is None else (self.draft_model.attention_shapes, self.draft_model.num_layers),
        )  # fmt: skip
        name = f"{loaded.geometry.architecture} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
        return f"operations of {name}"


def _run(recording: GpuRecording, index: int, counts: Mapping[str, int]) -> None:
    name, operation = recording.operations[index]
    if counts[name]:
        operation(counts[name])


def _at_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _reason(call: RecordedCall, found: Tensor, expected: Tensor) -> str | None:
    tolerance = _LOOSE if call.meaning.loose else Tolerance.of(found.dtype, call.operands(found))
    return tolerance.reason_against(found, expected)


def compare_models(models: Sequence[ModelCheck]) -> Fallbacks:
    """Compare models of one device, and say in one line how it went; returns what has fallen back.

    Raises KernelError, naming what has no right way to be computed.
    """
    began, checks, kernels = time.monotonic(), models[0].checks, models[0].device.kernels
    assert isinstance(kernels, GpuStateKernels)
    fallbacks = Fallbacks(kernels)
    for each in models:
        each.run(fallbacks)
    checks.fallen += fallbacks.lines()
    checks.log(time.monotonic() - began)
    return fallbacks
