"""Products by cuBLAS beside the reference: faults that the field has seen, and the products that take their place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.gpu.checks.model_check import compare_models
from executor_svc.gpu.choices.ways import KernelError
from executor_svc.gpu.exact import linear as exact_linear
from executor_svc.gpu.linear import PlainLinear
from tests.executor_svc.gpu.checks.checked import assert_same_tokens, loaded, logits_of, model_check
from tests.helpers.marks import short_and_long

MULTIPLY = PlainLinear.__call__


def short(x: Tensor, bits: int) -> Tensor:
    """Return x in float32 with so few bits of mantissa, rounded towards zero."""
    return (x.float().view(torch.int32) & -(1 << (23 - bits))).view(torch.float32).to(x.dtype)


def in_tf32(linear: PlainLinear, x: Tensor, *others: Any) -> Tensor:
    rounded = PlainLinear(short(linear.weight, 10), linear.bias)
    return MULTIPLY(rounded, short(x, 10), *others)


def summed_in_bfloat16(linear: PlainLinear, x: Tensor, out: Tensor | None = None, dtype: Any = None) -> Tensor:
    """Parts of 2 columns, each sum rounded."""
    total = torch.zeros(len(x), linear.out_features, dtype=torch.bfloat16)
    for some, weight in zip(x.split(2, 1), linear.weight.split(2, 1), strict=True):
        total += some @ weight.t()
    return total.to(dtype or x.dtype) if out is None else out.copy_(total)


def wrong_with_many_rows(linear: PlainLinear, x: Tensor, *others: Any) -> Tensor:
    found = MULTIPLY(linear, x, *others)
    if len(x) > 100:
        found[97] += 0.5 * found[97].float().norm() / len(found[97]) ** 0.5
    return found


def wrong_in_one_row(linear: PlainLinear, x: Tensor, *others: Any) -> Tensor:
    return MULTIPLY(linear, x, *others).mul_(1.03 if len(x) == 1 else 1)


WRONG: dict[str, tuple[Any, str, str]] = {
    "TF32 left on": (in_tf32, "float32", r"off by .* 2e-05 is allowed"),
    "sums in bfloat16": (summed_in_bfloat16, "bfloat16", "off by"),
    "a kernel for many rows": (wrong_with_many_rows, "bfloat16", r"one number is off by .* with 2048 rows"),
    "a kernel for one row": (wrong_in_one_row, "bfloat16", r"numbers are off by 0\.0[23]"),
}


@pytest.mark.parametrize("name", short_and_long([*WRONG], ["TF32 left on", "a kernel for many rows"]))
def test_products_of_exact_mode_take_the_place_of_wrong_ones(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, dtype, reason = WRONG[name]
    expected = logits_of(loaded(folder, dtype=dtype, quantization="none"))
    monkeypatch.setattr(PlainLinear, "__call__", multiply)
    model = loaded(folder, dtype=dtype, quantization="none")
    check = model_check(model)
    compare_models([check])
    fallen = check.checks.fallen
    assert fallen
    for line in fallen:
        assert line.startswith("linear (x ")
        assert ", by cuBLAS " in line
        assert ": product of exact mode, as kernel " in line
    assert re.search(reason, fallen[0])
    assert_same_tokens(logits_of(model), expected)


def test_each_shape_is_compared_with_few_rows_and_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: dict[tuple[int, int], set[int]] = {}

    def noted(linear: PlainLinear, x: Tensor, *others: Any) -> Tensor:
        rows.setdefault((linear.in_features, linear.out_features), set()).add(len(x))
        return MULTIPLY(linear, x, *others)

    monkeypatch.setattr(PlainLinear, "__call__", noted)
    model = loaded(folder, quantization="none")
    assert compare_models([model_check(model)]).reasons == {}
    assert rows == {
        (64, 512): {1, 8, 61, 2048}, (256, 64): {1, 8, 61, 2048}, (64, 192): {1, 8, 61, 2048},
        (96, 64): {1, 8, 61, 2048}, (64, 131): {1, 2, 8, 64},
    }  # fmt: skip


def test_without_a_right_product_the_start_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainLinear, "__call__", lambda *args: MULTIPLY(*args).mul_(1.03))
    launch = exact_linear.exact_product

    def wrong(x: Tensor, weight: Tensor, bias: Any, out: Tensor, *others: Any, **named: Any) -> None:
        launch(x, weight, bias, out, *others, **named)
        out.mul_(0.97)

    monkeypatch.setattr(exact_linear, "exact_product", wrong)
    with pytest.raises(
        KernelError,
        match=r"by cuBLAS 64 to 512.*: no way is right on this GPU: kernel numbers are off by 0.0.*, product of exact "
        r"mode numbers are off by 0.03.*; --kernel-checks report",
    ):
        compare_models([model_check(loaded(folder, quantization="none"))])
