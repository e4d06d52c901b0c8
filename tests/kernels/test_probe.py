"""The probes hold here for what models bring, and see each thing that they are there to see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.device import CpuDevice, NumericsError
from executor_svc.kernels.cpu import elementwise
from executor_svc.kernels.cpu.probe import probe_elementwise, probe_norm_heads
from executor_svc.kernels.interface import AttentionShape

SHAPE = AttentionShape(4, 2, 20, 32, 1.0)


def with_other_last_bits(function: Callable[..., Tensor], when: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """Return function with its results scaled by 1 + 2^-6 where `when` holds for its first argument."""
    return lambda x, *rest: function(x, *rest) * (1 + 2**-6 if when(x) else 1)


@pytest.mark.parametrize("head_size", [8, 16, 20, 64, 80, 128, 256])
def test_norms_of_heads_hold(head_size: int) -> None:
    assert probe_norm_heads(AttentionShape(6, 3, head_size, -(-head_size // 16) * 16, 1.0)) is None


@pytest.mark.parametrize("hidden_size", [1, 42, 576])
def test_elementwise_operations_hold(hidden_size: int) -> None:
    assert probe_elementwise(hidden_size) is None


@pytest.mark.parametrize("name", ["exp", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_whose_tails_differ_is_seen(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = getattr(torch, name)
    patched = with_other_last_bits(plain, lambda x: x.numel() % 16 == 1 and x.dtype == dtype)
    monkeypatch.setattr(torch, name, patched)
    assert str(probe_elementwise(64)).startswith(f"{name} in {dtype}: an element has other bits among")


def test_norms_that_depend_on_the_number_of_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = elementwise._normalized
    monkeypatch.setattr(elementwise, "_normalized", with_other_last_bits(plain, lambda x: x.shape[0] == 3))
    assert probe_elementwise(64) == "rms_norm (hidden size 64): a row has other bits among 3 rows than among 129"
    assert probe_norm_heads(SHAPE) == "norm_heads (head size 20): a row has other bits among 3 rows than among 129"


def test_one_choice_of_query_tiles_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later shape that allows all sizes does not undo what an earlier one needs."""

    def wide_heads_need_one(shape: AttentionShape, tiles: tuple[int, ...]) -> str | None:
        return "sizes differ" if len(tiles) > 1 and shape.head_size > 20 else None

    monkeypatch.setattr("executor_svc.device.probe_attention", wide_heads_need_one)
    device = CpuDevice(ExecutorConfig(model="m", num_threads=1))
    device.probe_numerics([AttentionShape(4, 2, 64, 64, 1.0), SHAPE], 64, 16)
    assert device.kernels.name.endswith("query-tiles-16")


def test_shapes_that_differ_in_windows_only_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[AttentionShape] = []
    monkeypatch.setattr("executor_svc.device.probe_norm_heads", lambda shape: probed.append(shape))
    device = CpuDevice(ExecutorConfig(model="m", num_threads=1))
    device.probe_numerics([SHAPE, AttentionShape(4, 2, 20, 32, 1.0, window=7)], 64, 16)
    assert probed == [SHAPE]


def test_a_fault_stops_exact_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.device.probe_norm_heads", lambda shape: "norm_heads: rows differ")
    device = CpuDevice(ExecutorConfig(model="m", num_threads=1))
    with pytest.raises(NumericsError, match=r"norm_heads: rows differ; .* use --numerics fast"):
        device.probe_numerics([SHAPE], 64, 16)
