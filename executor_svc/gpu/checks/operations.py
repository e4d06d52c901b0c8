"""The operations that a recorded model has, each with its expected result, and a label for each kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.kernels import AttentionShape, HeadNorms, KVScales, Rope
from executor_svc.gpu.checks import adapters, expert_meanings, meanings
from executor_svc.gpu.checks.linears import narrow_rows, product_of, results_of_product
from executor_svc.gpu.checks.meanings import Meaning
from executor_svc.gpu.kernels.gpu_kernels import GpuRecording
from executor_svc.gpu.kernels.lora.adapter_places import GpuAdapterPlaces
from executor_svc.gpu.linear import PlainLinear
from executor_svc.gpu.states import GpuStateKernels

MEANINGS: Mapping[str, Meaning] = {
    **meanings.MEANINGS,
    **expert_meanings.MEANINGS,
    **adapters.MEANINGS,
    "silu_mul": Meaning(lambda v, n, to: [reference.silu_mul(to(v["gate_up"][:n]))]),
    "gelu_tanh_mul": Meaning(lambda v, n, to: [reference.gelu_tanh_mul(to(v["gate_up"][:n]))]),
    "linear": Meaning(product_of, results_of_product),
}
"""By the name of the method of the kernels."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an operation while a model was recorded."""

    name: str
    label: str
    """Operation, shapes and dtypes: calls of one label launch the same kernels."""
    values: Mapping[str, Any]
    result: Any
    rows: str
    """The name of the number of rows."""
    recording: GpuRecording
    operations: range
    """Its places among the recorded ones."""

    @property
    def meaning(self) -> Meaning:
        return MEANINGS[self.name]

    def operands(self, found: Tensor) -> torch.dtype:
        """Return the narrowest dtype in which this result's operands are."""
        if self.name == "linear" and narrow_rows(self.values["linear"]):
            return torch.float8_e4m3fn
        values = self.values.values()
        dtypes = [each.dtype if isinstance(each, Tensor) else each for each in values
                  if isinstance(each, Tensor | torch.dtype)]  # fmt: skip
        wide = [each for each in dtypes if each.is_floating_point and each.itemsize > 1]
        return max(wide, key=lambda dtype: torch.finfo(dtype).eps, default=found.dtype)


def bound(name: str, kernels: GpuStateKernels, args: Any, named: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults too."""
    arguments = inspect.signature(getattr(type(kernels), name)).bind(kernels, *args, **named)
    arguments.apply_defaults()
    found = dict(arguments.arguments)
    del found["self"]
    return found


def label_of(name: str, values: Mapping[str, Any]) -> str:
    """Return the label of the kernel of a call: the operation, shapes and dtypes, without numbers of rows."""
    parts = [text for key, value in values.items() if (text := _text(key, value))]
    return f"{name} ({', '.join(parts)})"


def shape_text(shape: AttentionShape) -> str:
    """Return an attention's shape in words."""
    known = {"num_heads", "num_kv_heads", "head_size", "padded_head_size", "scale"}
    more = [f"{each.name} {value}" for each in fields(shape) if each.name not in known
            and (value := getattr(shape, each.name)) is not None]  # fmt: skip
    return " ".join([f"{shape.num_heads} heads of {shape.head_size}, {shape.num_kv_heads} of KV", *more])


def _text(key: str, value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"blocks of {value.shape[3]} {kind}" if key == "kv_layer" else f"{key} {value.shape[-1]} {kind}"
    if isinstance(value, AttentionShape):
        return shape_text(value)
    if isinstance(value, HeadNorms):
        return f"norms of {value.kind}{' and values' if value.v is not None else ''}"
    if isinstance(value, Rope):
        return f"{value.cos.shape[1]} rotated"
    if isinstance(value, KVScales):
        return "scales"
    if isinstance(value, GpuAdapterPlaces):
        return f"{value.products.num_parts} pairs of at most {value.products.max_rank}"
    if isinstance(value, PlainLinear):
        return f"by cuBLAS {value.in_features} to {value.out_features}"
    if hasattr(value, "in_features"):
        return f"{type(value).__name__} {value.in_features} to {value.out_features}"
    return f"{key} {value}" if isinstance(value, str | torch.dtype) else ""


@contextmanager
def noted(kernels: GpuStateKernels) -> Iterator[list[RecordedCall]]:
    """Note the calls of operations inside, as the kernels record them."""
    found: list[RecordedCall] = []
    inside = [False]

    def note(name: str, method: Any, *args: Any, **named: Any) -> Any:
        recording = kernels.current_recording
        if inside[0] or recording is None:
            return method(*args, **named)
        inside[0], first, rows = True, len(recording.operations), recording.rows
        try:
            result = method(*args, **named)
        finally:
            inside[0] = False
        values = bound(name, kernels, args, named)
        operations = range(first, len(recording.operations))
        found.append(RecordedCall(name, label_of(name, values), values, result, rows, recording, operations))
        return result

    before = {name: kernels.__dict__.get(name) for name in MEANINGS}
    for name in MEANINGS:
        setattr(kernels, name, partial(note, name, getattr(kernels, name)))
    try:
        yield found
    finally:
        for name, own in before.items():
            delattr(kernels, name)
            if own is not None:
                setattr(kernels, name, own)
