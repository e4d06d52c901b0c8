"""The probe holds here for what models bring, and sees what it is there to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.cpu.kernels.cpu_kernels import CpuKernels
from executor_svc.cpu.kernels.linear import CpuLinear, probe_linear
from executor_svc.device.interface import NumericsError


class OtherBits(CpuLinear):
    """A linear whose rows have other last bits among some numbers of rows."""

    other: tuple[int, ...] = ()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        y = super().__call__(x, out_dtype)
        return y * (1 + 2**-6) if x.shape[0] in self.other else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (100, 42), (33, 1001), (576, 64)])
def test_linears_hold(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear = CpuLinear(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), None, CpuKernels())
    for max_rows in (1, 2, 8, 512):
        assert probe_linear(linear, dtype, max_rows) is None


@pytest.mark.parametrize(("count", "most"), [(1, 97), (12, 97), (25, 97), (1, 8)])
def test_a_linear_that_depends_on_the_number_of_rows_is_seen(count: int, most: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        linear = OtherBits(torch.ones(5, 8, dtype=dtype), None, CpuKernels())
        linear.other = (count,)
        assert probe_linear(linear, dtype, most) == f"a row has other bits among {count} rows than among {most}"
        assert probe_linear(linear, dtype, 1) is None, "a step of one row has no others"


@pytest.mark.parametrize("largest", [3e38, float("nan"), float("inf")])
def test_results_that_are_nan_say_nothing_of_the_machine(largest: float) -> None:
    weight = torch.randn(33, 100, generator=torch.Generator().manual_seed(0))
    weight[3] = torch.tensor([largest, -largest] * 50)
    assert probe_linear(CpuLinear(weight, None, CpuKernels()), torch.float32, 97) is None


@pytest.mark.parametrize("max_drafts", [1, 3, 5, 20])
def test_every_number_of_rows_that_drafts_bring_is_tried(max_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At start, with the option: one row, as without drafts, gives what 2 to k + 1 rows give."""
    options = {"speculative": "suffix", "num_speculative_tokens": max_drafts}
    device = CpuDevice(ExecutorConfig(model="m", num_threads=1, **options))
    linear = OtherBits(torch.ones(5, 8), None, CpuKernels())
    monkeypatch.setattr(device, "_linears", {"key": ("a", linear, torch.float32)})
    for count in {*range(1, min(max_drafts, 11) + 2), max_drafts + 1}:
        linear.other = (count,)
        with pytest.raises(NumericsError, match=f"a row has other bits among {count} rows than among 64"):
            device.probe_numerics(64)
    linear.other = ()
    device.probe_numerics(64)


def test_each_shape_is_probed_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[tuple[int, int, bool]] = []

    def probe(linear: CpuLinear, dtype: torch.dtype, max_rows: int, more: tuple[int, ...]) -> str | None:
        assert (dtype, max_rows, more) == (torch.float32, 64, ())
        probed.append((linear.in_features, linear.out_features, linear.bias is not None))
        return "rows differ" if linear.out_features == 7 else None

    monkeypatch.setattr("executor_svc.cpu.device.probe_linear", probe)
    device = CpuDevice(ExecutorConfig(model="m", num_threads=1, speculative="off"))
    shapes: list[tuple[str, tuple[Any, ...]]] = [("a", (5, 8)), ("b", (5, 8)), ("c", (8, 5))]
    for name, shape in shapes:
        device.prepare_linear(name, torch.ones(shape))
    device.prepare_linear("d", torch.ones(5, 8), torch.ones(5))
    device.probe_numerics(64)
    assert probed == [(8, 5, False), (5, 8, False), (8, 5, True)]
    device.prepare_linear("e", torch.ones(7, 8))
    with pytest.raises(NumericsError, match=r"linear e \(in 8, out 7, .*\): rows differ; .* use --numerics fast"):
        device.probe_numerics(64)
