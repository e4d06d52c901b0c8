"""Compares a model's operations with their references on the GPU at hand, before anything is served.

Small steps are run operation by operation. What is not right falls back, and the steps are run again with what took its
place, until all is right or something has no other way.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device.interface import Device
from executor_svc.device.kv_cache import DraftLayers
from executor_svc.gpu.checks.adapters import ADAPTER_OPERATIONS, CheckedAdapters
from executor_svc.gpu.checks.fallbacks import Fallbacks
from executor_svc.gpu.checks.linears import repeated
from executor_svc.gpu.checks.model_steps import LONG, ModelSteps
from executor_svc.gpu.checks.operations import RecordedCall, noted
from executor_svc.gpu.checks.steps.step_check import StepCheck
from executor_svc.gpu.choices.ways import KernelChecks, Tolerance
from executor_svc.gpu.kernels.gpu_kernels import GpuRecording
from executor_svc.gpu.linear import PlainLinear
from executor_svc.gpu.ranks import GpuRanks
from executor_svc.gpu.skinny.recording import EitherKernels
from executor_svc.gpu.states import GpuStateKernels
from executor_svc.models.decoder import Decoder
from executor_svc.models.heads.head import DraftHead
from executor_svc.models.loading import LoadedModel

_log = logging.getLogger(__name__)
_LOOSE = Tolerance(math.inf, 0.05)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A call whose results are not right."""

    call: RecordedCall
    reason: str


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one recording: which calls are compared, and what has failed."""

    steps: ModelSteps
    calls: list[RecordedCall]
    fallbacks: Fallbacks
    failures: dict[str, _Failure]
    adapters: CheckedAdapters | None = None
    """What is in the places; then only operations of adapters are compared, the others were."""

    def compares(self, call: RecordedCall, seen: Collection[str]) -> bool:
        """Return whether a call is compared, the first of its label in each step; after a failure, all are replaced."""
        is_new = call.label not in seen and (self.adapters is None or call.name in ADAPTER_OPERATIONS)
        return is_new or call.label in self.failures

    def is_kept(self, label: str, checks: KernelChecks) -> bool:
        """Return whether a call is known to be off, and used all the same."""
        return label in self.fallbacks.kept and checks.runs(label, self.fallbacks.way_of(label))


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The comparison of one model."""

    loaded: LoadedModel
    device: Device
    config: ExecutorConfig
    checks: KernelChecks
    draft: DraftLayers | None = None
    """Layers of a draft model or head in the same cache."""
    draft_model: Decoder | DraftHead | None = None
    """The model or head to compare, in place of `loaded`'s, over the draft layers."""
    long: int = LONG
    """Tokens of the longer prompt."""

    @torch.inference_mode()
    def run(self, fallbacks: Fallbacks) -> None:
        """Compare, unless an earlier start has, and let fall back what is not right. Raises KernelError."""
        fallbacks.once(self._key(), lambda: self._compare(fallbacks))

    def _compare(self, fallbacks: Fallbacks) -> None:
        kernels = self.device.kernels
        assert isinstance(kernels, GpuStateKernels)
        while True:
            with kernels.passing(), alone(self.loaded):
                failures = self._failures(kernels, fallbacks)
            if not failures:
                return
            for failure in failures.values():
                fallbacks.fall_back(failure.call, failure.reason)

    def _failures(self, kernels: GpuStateKernels, fallbacks: Fallbacks) -> dict[str, _Failure]:
        """Run all steps; returns the first failure of each label."""
        apart = kernels.apart() if isinstance(kernels, EitherKernels) else nullcontext()
        with noted(kernels) as calls, apart:
            steps = ModelSteps.of(self.loaded, self.device, self.config, self.draft, self.draft_model, self.long)
        # A model's steps, then its logits that are requested later; the same with adapters.
        base, *others = dict.fromkeys(call.recording for call in calls)
        failures: dict[str, _Failure] = {}
        self._run_steps(_Steps(steps, _of(base, calls), fallbacks, failures))
        if steps.has_adapters:
            adapted = _of(others[1], calls)
            first = {call.label: call.values for call in reversed(adapted)}
            contents = CheckedAdapters.of(first, steps.limits.vocab_size)
            with contents.in_places():
                self._run_steps(_Steps(steps, adapted, fallbacks, failures, contents))
        return failures

    def _run_steps(self, run: _Steps) -> None:
        """Run the steps of one recording; notes what fails."""
        operations = run.calls[0].recording.operations
        own = {call.operations.start: call for call in run.calls}
        for number, (_, chunks) in enumerate(run.steps.steps()):
            counts, seen, index = run.steps.fill(chunks, run.adapters), set[str](), 0
            if counts is None:
                continue
            while index < len(operations):
                call = own.get(index)
                if call is None or not counts[call.rows] or not run.compares(call, seen):
                    _run(run.calls[0].recording, index, counts)
                    index += 1
                    continue
                seen.add(call.label)
                reason = self._reason_against(call, counts, run, many=number == 0)
                if reason is not None and not run.is_kept(call.label, self.checks):
                    run.failures.setdefault(call.label, _Failure(call, reason))
                index = call.operations.stop

    def _reason_against(self, call: RecordedCall, counts: Mapping[str, int], run: _Steps, many: bool) -> str | None:
        """Run a call and compare it; what is not right, or is not to run again, is replaced by what is expected.

        So what comes after it is compared for itself. many: whether products by cuBLAS are compared with as many rows
        as a step may have, too.
        """
        n, runs = counts[call.rows], call.label not in run.failures
        values = call.values
        if call.name in ADAPTER_OPERATIONS:
            values = {**values, "adapters": run.adapters}
        expected = call.meaning.expected(values, n, _at_host)

        def compare() -> str | None:
            for index in call.operations:
                _run(call.recording, index, counts)
            found = call.meaning.found(call.values, call.result, n)
            reason = next(filter(None, map(partial(_reason, call), found, expected)), None)
            if many and run.fallbacks.attends_by_torch(call.label):
                run.fallbacks.seconds[call.label] = self._seconds_text(call, counts)
            return self._reason_of_many(call, n, expected) if reason is None and many else reason

        reason = self.checks.tried(call.label, run.fallbacks.way_of(call.label), compare) if runs else None
        if reason is not None or not runs:
            for found, value in zip(call.meaning.found(call.values, call.result, n), expected, strict=True):
                found.copy_(value.float())
        return reason

    def _seconds_text(self, call: RecordedCall, counts: Mapping[str, int]) -> str:
        """Return how long a call takes, which has run before, as text."""
        self.checks.wait()
        began = time.monotonic()
        for index in call.operations:
            _run(call.recording, index, counts)
        self.checks.wait()
        return f"{time.monotonic() - began:.3g} s a layer for a prompt of {counts[call.rows]} tokens"

    def _reason_of_many(self, call: RecordedCall, n: int, expected: list[Tensor]) -> str | None:
        """Compare a product by cuBLAS, which has other kernels for other numbers of rows, at the most of a step."""
        linear, config = call.values["linear"] if call.name == "linear" else None, self.config
        if not isinstance(linear, PlainLinear):
            return None
        most = config.max_num_seqs if call.rows == "sampled" else config.max_num_batched_tokens
        x = repeated(call.values["x"][:n], most)
        kernels = self.device.kernels
        assert isinstance(kernels, GpuStateKernels)
        result = kernels.linear(x, linear, call.result.dtype)
        found = call.meaning.found(call.values, result, most)
        wanted = [repeated(each, most) for each in expected]
        reason = next(filter(None, map(partial(_reason, call), found, wanted)), None)
        return None if reason is None else f"{reason} with {most} rows"

    def _key(self) -> str:
        """Return a key: models with the same key launch the same kernels."""
        loaded, config = self.loaded, self.config
        parts = (
            loaded.spec_digest.hex(), loaded.geometry, self.device.isa, self.device.numerics, self.device.kv_dtype,
            self.device.few_bits.forms, config.block_size, None if loaded.ranks is None else loaded.ranks.share,
            # Products by cuBLAS are compared with as many rows as a step may have.
            config.max_num_seqs, config.max_num_batched_tokens, self.long,
            None if loaded.adapters is None else loaded.adapters.sizes,
            None if self.draft_model is None else (
                self.draft_model.attention_shapes, self.draft_model.num_layers, config.speculative,
                config.speculative_model, type(self.draft_model).__name__,
            ),
        )  # fmt: skip
        name = f"{loaded.geometry.architecture} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
        return f"operations of {name}"


def alone(loaded: LoadedModel) -> AbstractContextManager[None]:
    """Return a context in which a rank's operations wait for no other rank."""
    return loaded.ranks.alone() if isinstance(loaded.ranks, GpuRanks) else nullcontext()


def _of(recording: GpuRecording, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    return [call for call in calls if call.recording is recording]


def _run(recording: GpuRecording, index: int, counts: Mapping[str, int]) -> None:
    name, operation = recording.operations[index]
    if counts[name]:
        operation(counts[name])


def _at_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()


def _reason(call: RecordedCall, found: Tensor, expected: Tensor) -> str | None:
    tolerance = _LOOSE if call.meaning.loose else Tolerance.of(found.dtype, call.operands(found))
    return tolerance.reason_against(found, expected)


def compare_models(models: Sequence[ModelCheck], steps: StepCheck | None = None) -> Fallbacks:
    """Compare models of one device, and say in one line how it went; returns what has fallen back.

    steps: what they are surrounded by, to be compared too.

    Raises KernelError, naming what has no right way to be computed.
    """
    began, checks, kernels = time.monotonic(), models[0].checks, models[0].device.kernels
    assert isinstance(kernels, GpuStateKernels)
    fallbacks = Fallbacks(kernels, checks, divided=models[0].loaded.ranks is not None)
    for each in models:
        each.run(fallbacks)
    if steps is not None:
        steps.run(fallbacks)
    checks.fallen += fallbacks.lines()
    checks.kept += [f"{label}: {reason}" for label, reason in fallbacks.kept.items()]
    checks.log(time.monotonic() - began)
    for label, text in fallbacks.seconds.items():
        _log.warning("%s: by PyTorch, VERY SLOW: %s; steps run without CUDA graphs", label, text)
    return fallbacks
