"""Products of few rows against their float64 meaning, with what stands beside them, and beside other rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.device.kernels import GatedActivation
from executor_svc.gpu.kernels.norm import rms_norm
from executor_svc.gpu.kernels.skinny.product import RowNorm, skinny_product, square_rows
from executor_svc.gpu.kernels.skinny.tiles import GATED_NARROW, GATED_WIDE, NARROW, WIDE, SkinnyPlan, SkinnyScratch

SMS = 132
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
ACTIVATIONS: dict[GatedActivation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def guarded(values: Tensor, device: torch.device) -> Tensor:
    """The same values with NaN behind them."""
    memory = torch.full((values.numel() + 2048,), float("nan"), dtype=values.dtype, device=device)
    return memory[: values.numel()].view(values.shape).copy_(values)


def scratch_of(plan: SkinnyPlan, gated: bool, device: torch.device) -> SkinnyScratch:
    scratch = SkinnyScratch.of(plan.sums_size(gated), plan.num_tiles, device)
    scratch.sums.fill_(float("nan"))
    return scratch


class Made:
    """Rows, a weight of `times` as many features, and what a product may take beside them."""

    def __init__(
        self, rows: int, features: int, columns: int, device: torch.device, dtype: torch.dtype, times: int = 1
    ) -> None:
        generator = torch.Generator().manual_seed(rows + features + columns)

        def random(*size: int) -> Tensor:
            return guarded(torch.randn(size, generator=generator).to(dtype), device)

        self.x, self.weight = random(rows, columns), random(times * features, columns)
        self.weight /= columns**0.5
        self.bias, self.out = random(times * features), random(rows, features)
        self.norm_weight = random(columns)
        self.gated = times == 2
        self.plan = SkinnyPlan.of(features, columns, self.gated, SMS)
        self.scratch = scratch_of(self.plan, self.gated, device)
        before = SkinnyPlan.of(columns, 512, False, SMS)
        self.squares = torch.full((before.num_tiles, 16), float("nan"), device=device)
        square_rows(self.x, self.squares, before)

    def wide(self, x: Tensor, biased: bool = False) -> tuple[Tensor, Tensor]:
        """The product of rows x in float64, and the largest error that sums in float32 may have."""
        product = x.double() @ self.weight.double().t()
        sizes = x.double().abs() @ self.weight.double().abs().t()
        bias = self.bias.double() if biased else torch.zeros_like(self.bias).double()
        return product + bias, (x.shape[1] + 4) * 2**-23 * (sizes + bias.abs()) + 1e-7


def near(found: Tensor, expected: Tensor, error: Tensor, roundings: int = 1) -> None:
    unit = UNIT[found.dtype]
    assert ((found.double() - expected).abs() <= error + roundings * unit * (expected.abs() + error)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "features", "columns"),
    [(1, 33, 16), (16, 64, 1040), (3, 100, 272), (7, 1, 528), (2, 8450, 144)],
)
def test_products(rows: int, features: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    made = Made(rows, features, columns, device, dtype)
    skinny_product(made.x, made.weight, made.out, made.scratch, made.plan, bias=made.bias)
    near(made.out, *made.wide(made.x, biased=True))
    assert not made.scratch.counters.any()


def test_plans_of_layers() -> None:
    """Tiles and parts of the 8B and the 0.6B shape on an H200: most multiprocessors have one program or two."""
    plans = {
        (features, columns, gated): SkinnyPlan.of(features, columns, gated, SMS)
        for features, columns, gated in (
            (6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False),
            (4096, 1024, False), (1024, 2048, False), (3072, 1024, True), (1024, 3072, False),
        )
    }  # fmt: skip
    assert {plan.tile for plan in plans.values()} == {WIDE, NARROW, GATED_WIDE, GATED_NARROW}
    for (features, columns, gated), plan in plans.items():
        assert 0.7 * SMS <= plan.num_tiles * plan.parts <= 2 * SMS
        assert (plan.num_tiles - 1) * plan.tile.features < features <= plan.num_tiles * plan.tile.features
        assert (plan.parts - 1) * plan.part < columns <= plan.parts * plan.part, (features, columns, gated)
    # Large weights are read by wide tiles, which read x less often; small ones in few parts, which leave fewer sums.
    assert plans[4096, 14336, False] == SkinnyPlan(WIDE, 64, 2, 7168)
    assert plans[1024, 2048, False] == SkinnyPlan(NARROW, 32, 4, 512)
    # Of too few for all multiprocessors as many as there can be.
    assert SkinnyPlan.of(100, 1024, False, SMS) == SkinnyPlan(NARROW, 4, 4, 256)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 528), (5, 80), (16, 1040)])
def test_norms_before_a_product(rows: int, columns: int, wide: bool, device: torch.device) -> None:
    """By the sums of squares of tiles: rows round as those of `rms_norm` do, but for the order of sums."""
    made = Made(rows, 70, columns, device, torch.bfloat16)
    weight = made.norm_weight.float() if wide else made.norm_weight
    norm = RowNorm(weight, 1e-5, made.squares)
    normed = torch.empty_like(made.x)
    rms_norm(made.x, weight, 1e-5, normed)
    skinny_product(made.x, made.weight, made.out, made.scratch, made.plan, norm)
    expected, error = made.wide(normed)
    # Some numbers are rounded to their other neighbour where sums of squares differ in their last bit.
    terms = normed.double().abs()[:, None, :] * made.weight.double().abs()[None]
    near(made.out, expected, error + 3 * UNIT[torch.bfloat16] * terms.amax(2))


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize(("rows", "features", "columns"), [(1, 96, 528), (16, 72, 80), (9, 200, 1040)])
def test_sums_with_the_residual(rows: int, features: int, columns: int, scale: float, device: torch.device) -> None:
    made = Made(rows, features, columns, device, torch.bfloat16)
    before, product = made.out.clone(), torch.empty_like(made.out)
    skinny_product(made.x, made.weight, product, made.scratch, made.plan)
    squares = torch.full((made.plan.num_tiles, 16), float("nan"), device=device)
    skinny_product(made.x, made.weight, made.out, made.scratch, made.plan, squares=squares, scale=scale)
    scaled = (product.float() * scale).to(product.dtype) if scale != 1 else product
    assert torch.equal(made.out, scaled + before)
    # What is left for the norm that follows.
    expected = torch.zeros_like(squares)
    square_rows(made.out, expected, made.plan)
    assert torch.equal(squares[:, :rows], expected[:, :rows])
    assert torch.allclose(squares[:, :rows].sum(0).double(), made.out.double().square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "features", "columns"), [(1, 65, 144), (16, 33, 1040), (4, 96, 528)])
def test_gated_activations(
    rows: int, features: int, columns: int, activation: GatedActivation, device: torch.device
) -> None:
    made = Made(rows, features, columns, device, torch.bfloat16, times=2)
    arguments = made.x, made.weight, made.out, made.scratch, made.plan
    skinny_product(*arguments, bias=made.bias, activation=activation)
    wide, error = made.wide(made.x, biased=True)
    gate, up = wide.chunk(2, 1)
    gate_error, up_error = error.chunk(2, 1)
    activated, unit = ACTIVATIONS[activation](gate), UNIT[torch.bfloat16]
    # Gate, its activation, whose slope is at most 1.2, and up are rounded before their product is.
    slack = (1.2 * (gate_error + unit * gate.abs()) + unit * activated.abs() + 1e-6) * up.abs()
    slack += (up_error + unit * up.abs()) * activated.abs()
    near(made.out, activated * up, 1.05 * slack)


@pytest.mark.parametrize("columns", [144, 1040])
def test_a_row_has_the_same_bits_beside_any_others(columns: int, device: torch.device) -> None:
    made = Made(16, 96, columns, device, torch.bfloat16)
    norm = RowNorm(made.norm_weight, 1e-5, made.squares)
    skinny_product(made.x, made.weight, made.out, made.scratch, made.plan, norm)
    for rows in (1, 2, 7):
        alone = torch.empty(rows, 96, dtype=torch.bfloat16, device=device)
        own = replace(norm, squares=made.squares[:, 16 - rows :].clone().contiguous())
        own = replace(norm, squares=functional.pad(own.squares, (0, 16 - rows), value=float("nan")))
        skinny_product(made.x[16 - rows :].contiguous(), made.weight, alone, made.scratch, made.plan, own)
        assert torch.equal(alone, made.out[16 - rows :])


def test_what_is_refused(device: torch.device) -> None:
    made = Made(2, 64, 64, device, torch.bfloat16)
    with pytest.raises(ValueError, match=r"x: must be \[0 to 16"):
        skinny_product(made.x.repeat(9, 1), made.weight, made.out, made.scratch, made.plan)
    with pytest.raises(ValueError, match="weight"):
        skinny_product(made.x, made.weight[:63], made.out, made.scratch, made.plan)
    with pytest.raises(ValueError, match="plan"):
        skinny_product(made.x, made.weight, made.out, made.scratch, SkinnyPlan(NARROW, 1, 1, 128))
    with pytest.raises(ValueError, match="multiple of 16"):
        skinny_product(made.x[:, :40].contiguous(), made.weight, made.out, made.scratch, made.plan)
    skinny_product(made.x[:0], made.weight, made.out[:0], made.scratch, made.plan)
