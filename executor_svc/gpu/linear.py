"""Linear layers on a GPU: with cuBLAS, or for 8-bit weights with Cadenza's kernel or PyTorch's scaled product.

The values of `--quantization` are those of other engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.interface import DeviceError
from executor_svc.gpu.kernels.linear_w8 import linear_w8, workspace_size
from executor_svc.gpu.kernels.quantize import quantize_fp8, quantize_int8, quantize_rows

Quantization = Literal["none", "int8", "fp8", "fp8_w8a8"]
"""int8 and fp8: weights only (W8A16); fp8_w8a8: also activations, with dynamic scales per row."""

_HOPPER_SMS = 132
ALIGNMENT = 16
"""Columns of weights of 8 bits are multiples of it."""


@dataclass(slots=True)
class SumsWorkspace:
    """Memory for partial sums, shared by the linears of one stream.

    Grows only at their creation, before any capture.
    """

    device: torch.device
    memory: Tensor | None = None
    """float32; None while no linear needs any."""

    def reserve(self, size: int) -> None:
        """Grow to at least `size` float32 numbers."""
        if size and (self.memory is None or self.memory.numel() < size):
            self.memory = torch.empty(size, dtype=torch.float32, device=self.device)


class PlainLinear:
    """x @ weight.T + bias, by cuBLAS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Take weight [out_features, in_features] and bias [out_features] or None, both in the model's dtype."""
        self.out_features, self.in_features = weight.shape
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32."""
        dtype = result_dtype(x, out, out_dtype)
        if dtype == x.dtype:
            if out is None:
                return functional.linear(x, self.weight, self.bias)
            if self.bias is None:
                return torch.mm(x, self.weight.t(), out=out)
            return torch.addmm(self.bias, x, self.weight.t(), out=out)
        return self._to_float(x, out)

    def _to_float(self, x: Tensor, out: Tensor | None) -> Tensor:
        out = new_out(x, self.out_features, torch.float32) if out is None else out
        if x.device.type == "cuda":
            torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            # On the CPU, PyTorch has no product with a wider result dtype.
            torch.mm(x.float(), self.weight.t().float(), out=out)
        return out if self.bias is None else out.add_(self.bias)


class W8Linear:
    """x @ weight.T + bias with 8-bit weights and 16-bit rows; only the quantized weight is kept."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, quantization: Literal["int8", "fp8"], workspace: SumsWorkspace
    ) -> None:
        """Quantize weight [out_features, in_features]; bias [out_features] or None."""
        self.out_features, self.in_features = weight.shape
        quantize = quantize_int8 if quantization == "int8" else quantize_fp8
        narrow, self.scale = quantize(weight)
        # Padding with zeros: the kernel reads 16 bytes at a time.
        self._padding = -self.in_features % ALIGNMENT
        self.weight = functional.pad(narrow.view(torch.int8), (0, self._padding)).view(narrow.dtype).contiguous()
        self.bias = torch.zeros_like(self.scale) if bias is None else bias.float().contiguous()
        self._num_sms = multiprocessors(weight.device)
        self._workspace = workspace
        workspace.reserve(workspace_size(self.out_features, self.weight.shape[1], self._num_sms))

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32."""
        if out is None:
            out = new_out(x, self.out_features, out_dtype or x.dtype)
        result_dtype(x, out, out_dtype)
        padded = functional.pad(x, (0, self._padding)) if self._padding else x
        linear_w8(padded, self.weight, self.scale, self.bias, out, self._workspace.memory, self._num_sms)
        return out


class Fp8Linear:
    """x @ weight.T + bias with both in fp8 e4m3, by `torch._scaled_mm`: a scale per row of x and per output channel.

    Tensor cores accumulate with fewer bits than float32 (use_fast_accum), as is usual for inference. Each call
    allocates memory for the quantized rows from PyTorch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Quantize weight [out_features, in_features]; bias [out_features] in the model's dtype or None."""
        self.out_features, self.in_features = weight.shape
        check_fp8_shape(self.out_features, self.in_features)
        self.weight, scale = quantize_fp8(weight)
        self.scale = scale.view(1, -1)
        self.bias = bias
        # On other GPUs, PyTorch's kernels for scales per row only have 16-bit results.
        self._to_float = weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device)[0] == 9

    def __call__(self, x: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
        """Map [rows, in_features] to [rows, out_features], into `out` if given; out_dtype: that of x, or float32.

        On GPUs other than Hopper, a float32 result is first rounded to the dtype of x.
        """
        dtype = result_dtype(x, out, out_dtype)
        if out is None:
            out = new_out(x, self.out_features, dtype)
        if dtype == x.dtype:
            return self._multiply(x, self.bias, out)
        if self._to_float:
            self._multiply(x, None, out)
            return out if self.bias is None else out.add_(self.bias)
        return out.copy_(self._multiply(x, self.bias, new_out(x, self.out_features, x.dtype)))

    def _multiply(self, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        quantize_rows(x, narrow, scales)
        torch._scaled_mm(
            narrow,
            self.weight.t(),
            scales.view(-1, 1),
            self.scale,
            bias=bias,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )
        return out


GpuLinear = PlainLinear | W8Linear | Fp8Linear


def make_linear(weight: Tensor, bias: Tensor | None, quantization: Quantization, workspace: SumsWorkspace) -> GpuLinear:
    """Prepare weight [out_features, in_features] and bias for use, on their device.

    Raises DeviceError naming the option if it does not support this GPU, dtype or shape, and ValueError for weights
    that are not finite.
    """
    check_quantization(quantization, weight.dtype, weight.device)
    if quantization == "none":
        return PlainLinear(weight, bias)
    if quantization == "fp8_w8a8":
        return Fp8Linear(weight, bias)
    return W8Linear(weight, bias, quantization, workspace)


def check_quantization(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> None:
    """Raise DeviceError, naming the option, if this device does not support it for models of this dtype."""
    if quantization == "none":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise DeviceError(f"--quantization {quantization}: needs --dtype bfloat16 or float16, not {name}")
    if quantization != "int8" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise DeviceError(
                f"--quantization {quantization}: needs a GPU of compute capability 8.9 or later, this has "
                f"{major}.{minor}; use --quantization int8"
            )


def check_fp8_shape(out_features: int, in_features: int) -> None:
    """Raise DeviceError, naming the option, for a shape that cannot be multiplied in fp8."""
    if out_features % ALIGNMENT or in_features % ALIGNMENT:
        raise DeviceError(
            f"--quantization fp8_w8a8: a linear layer of {in_features} to {out_features} features; both must be "
            f"multiples of {ALIGNMENT}"
        )


def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; of the one that the interpreter simulates, on the CPU."""
    if device.type != "cuda":
        return _HOPPER_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def new_out(x: Tensor, out_features: int, dtype: torch.dtype) -> Tensor:
    """Return memory for the result of rows x."""
    return torch.empty(x.shape[0], out_features, dtype=dtype, device=x.device)


def result_dtype(x: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result; raises ValueError if `out` has another or it is neither x's nor float32."""
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    if out is not None and out.dtype != dtype:
        raise ValueError(f"out: is {out.dtype}, out_dtype {dtype}")
    if dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out_dtype: must be {x.dtype} or float32, is {dtype}")
    return dtype
