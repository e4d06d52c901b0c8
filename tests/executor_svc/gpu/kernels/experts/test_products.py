"""The linears of experts on a GPU: the reference's numbers, bits of a row for itself, and what nobody asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.dequantize import dequantize
from executor_svc.device.experts import Router
from executor_svc.device.stored_linear import FewBits, StoredLinear
from executor_svc.gpu.device import RecordedLinear
from executor_svc.gpu.experts import GpuExpertKernels, GpuRoutes
from executor_svc.gpu.linear import Quantization, SumsWorkspace, make_linear
from executor_svc.gpu.stored_linear import GpuStoredLinear
from tests.executor_svc.cpu.kernels.quantized.formats import format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows

BFLOAT16 = torch.bfloat16
NUM_EXPERTS = 5
ROUTER = Router(NUM_EXPERTS, 2)
HIDDEN, WIDE = 72, 70
UNIT = {torch.float32: 2**-23, BFLOAT16: 2**-8, torch.float16: 2**-11}


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kernels_on(device: torch.device) -> GpuExpertKernels:
    return GpuExpertKernels(device, 90, 132)


def dense(
    kernels: GpuExpertKernels,
    device: torch.device,
    dtype: torch.dtype,
    kind: Quantization,
    biased: bool,
    hidden: int,
    wide: int = WIDE,
) -> tuple[list[RecordedLinear], Tensor, Tensor | None]:
    """Return linears, and the weights and biases that they are made of."""
    weights = randn(5, NUM_EXPERTS, wide, hidden).to(dtype)
    biases = randn(6, NUM_EXPERTS, wide).to(dtype) if biased else None
    linears = [
        RecordedLinear(
            make_linear(
                weights[expert].to(device),
                None if biases is None else biases[expert].to(device),
                kind,
                SumsWorkspace(device),
            ),
            kernels,
        )
        for expert in range(NUM_EXPERTS)
    ]
    return linears, weights, biases


def routes_of(kernels: GpuExpertKernels, device: torch.device, count: int, seed: int = 1) -> GpuRoutes:
    return kernels.route(randn(seed, count, NUM_EXPERTS).to(device), ROUTER, torch.float32)


def expected_rows(routed: Tensor, routes: GpuRoutes, weights: Tensor, biases: Tensor | None) -> Tensor:
    """Return each routed row's product with its expert, in float64."""
    found = torch.empty(len(routed), weights.shape[1], dtype=torch.float64)
    for expert in range(len(weights)):
        mine = routes.places[routes.ids == expert].cpu()
        bias = None if biases is None else biases[expert]
        found[mine] = reference.linear(routed[mine], weights[expert], bias)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("count", [1, 7, 40, 150])
@pytest.mark.parametrize(("dtype", "biased"), [(torch.float32, True), (BFLOAT16, True), (torch.float16, False)])
def test_rows_are_those_of_their_experts(dtype: torch.dtype, biased: bool, count: int, device: torch.device) -> None:
    kernels = kernels_on(device)
    linears, weights, biases = dense(kernels, device, dtype, "none", biased, HIDDEN)
    routes, x = routes_of(kernels, device, count), randn(2, count, HIDDEN).to(dtype).to(device)
    routed = kernels.take_routed(x, routes)
    found = kernels.expert_linear(linears)(routed, routes).cpu().double()
    expected = expected_rows(routed.cpu(), routes, weights, biases)
    magnitudes = expected_rows(routed.cpu().abs(), routes, weights.abs(), None)
    assert found.shape == expected.shape
    bound = (HIDDEN + 4) * 2**-23 * magnitudes + UNIT[dtype] * expected.abs() + 1e-6
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("kind", "hidden", "wide"), [("int8", HIDDEN, WIDE), ("fp8", HIDDEN, WIDE), ("fp8_w8a8", 80, 80)]
)
def test_rows_of_8_bits_are_those_of_each_linear(
    kind: Quantization, hidden: int, wide: int, device: torch.device
) -> None:
    """But for the order of sums."""
    kernels = kernels_on(device)
    linears, _, _ = dense(kernels, device, BFLOAT16, kind, True, hidden, wide)
    for count in (3, 60):
        routes, x = routes_of(kernels, device, count), randn(2, count, hidden).to(BFLOAT16).to(device)
        routed = kernels.take_routed(x, routes)
        found = kernels.expert_linear(linears)(routed, routes)
        for expert, linear in enumerate(linears):
            mine = routes.places[routes.ids == expert]
            if len(mine):
                torch.testing.assert_close(found[mine], linear(routed[mine]), rtol=2**-7, atol=2**-6)


def in_few_bits(
    kernels: GpuExpertKernels, device: torch.device, names: list[str]
) -> tuple[list[RecordedLinear], Tensor]:
    """Return linears of a part of random codes for each name, one below the other, and their numbers."""
    linears, numbers = [], []
    for seed in range(NUM_EXPERTS):
        kinds = [format_of(name, 256) for name in names]
        blocks = [random_block(kind, 70, 256, 10 * seed + part) for part, kind in enumerate(kinds)]
        bias = randn(seed, 70 * len(names)).to(BFLOAT16).to(device)
        weight = StoredLinear([BlockRows(*each) for each in zip(kinds, blocks, strict=True)], BFLOAT16)
        linears.append(RecordedLinear(GpuStoredLinear("test", weight, bias, SumsWorkspace(device), FewBits()), kernels))
        numbers.append(torch.cat([dequantize(*each) for each in zip(blocks, kinds, strict=True)]))
    return linears, torch.stack(numbers)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [4, 60])
@pytest.mark.parametrize(
    "names", [["Q4_K"], ["Q6_K", "Q8_0"], ["mxfp4"], ["gptq 4"], ["fp8 blocks"], ["IQ4_NL"]], ids=str
)
def test_experts_in_few_bits(names: list[str], count: int, device: torch.device) -> None:
    """Of 70 rows a part, which fill no tile."""
    kernels = kernels_on(device)
    linears, numbers = in_few_bits(kernels, device, names)
    routes, x = routes_of(kernels, device, count), randn(2, count, 256).to(BFLOAT16).to(device)
    routed = kernels.take_routed(x, routes)
    found = kernels.expert_linear(linears)(routed, routes).cpu().double()
    biases = torch.stack([randn(seed, found.shape[1]).to(BFLOAT16) for seed in range(NUM_EXPERTS)])
    expected = expected_rows(routed.cpu(), routes, numbers, biases)
    magnitudes = expected_rows(routed.cpu().abs(), routes, numbers.abs(), biases.abs())
    # Each number is rounded to bfloat16, and so is the result.
    assert ((found - expected).abs() <= 2**-8 * (magnitudes + expected.abs())).all()


@pytest.mark.usefixtures("ordered_products")
def test_a_row_has_its_bits_whatever_is_beside_it(device: torch.device) -> None:
    """In steps of as many tokens, and whichever rows share its expert."""
    kernels = kernels_on(device)
    linears, _, _ = dense(kernels, device, BFLOAT16, "none", True, HIDDEN)
    product = kernels.expert_linear(linears)
    logits, x = randn(1, 9, NUM_EXPERTS), randn(2, 9, HIDDEN).to(BFLOAT16)
    others, more = randn(3, 9, NUM_EXPERTS), randn(4, 9, HIDDEN).to(BFLOAT16)
    others[8], more[8] = logits[0], x[0]
    rows = []
    for scores, values, token in ((logits, x, 0), (others, more, 8)):
        routes = kernels.route(scores.to(device), ROUTER, BFLOAT16)
        found = product(kernels.take_routed(values.to(device), routes), routes)
        rows.append(found[routes.places[token]])
    assert torch.equal(*rows)


@pytest.mark.parametrize("few_bits", [False, True])
def test_an_expert_that_nobody_chose_is_not_read(few_bits: bool, device: torch.device) -> None:
    kernels = kernels_on(device)
    if few_bits:
        linears, _ = in_few_bits(kernels, device, ["Q8_0"])
        part = linears[3].linear.parts[0]  # type: ignore[union-attr]
        part.weight.planes[2].fill_(math.nan)  # type: ignore[union-attr]
    else:
        linears, _, _ = dense(kernels, device, BFLOAT16, "none", True, 256)
        linears[3].linear.weight.fill_(math.nan)  # type: ignore[union-attr]
    product = kernels.expert_linear(linears)
    logits = randn(1, 30, NUM_EXPERTS)
    logits[:, 3] = -100.0
    routes = kernels.route(logits.to(device), ROUTER, torch.float32)
    routed = kernels.take_routed(randn(2, 30, 256).to(BFLOAT16).to(device), routes)
    assert product(routed, routes).isfinite().all()
    routed[5] = math.nan
    spoilt = product(routed, routes).isnan().all(1)
    assert spoilt.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("beside", "gated"), [(False, False), (True, False), (True, True)])
def test_the_sum_is_that_of_the_reference(
    dtype: torch.dtype, rounded: bool, beside: bool, gated: bool, device: torch.device
) -> None:
    kernels, router = kernels_on(device), Router(6, 4, rounded=rounded)
    routes = kernels.route(randn(1, 20, 6).to(device), router, dtype)
    x, more, gate = (randn(*shape).to(dtype) for shape in ((2, 80, 1050), (3, 20, 1050), (4, 20, 1)))
    expected = reference.combine(x[routes.places.cpu()], routes.weights.cpu())
    if beside:
        expected += more.double() * (gate.double().sigmoid() if gated else 1)
    given = more.to(device) if beside else None, gate.to(device) if gated else None
    found = kernels.combine(x.to(device), routes, router, *given)
    tolerance = 3e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_weights_may_multiply_what_experts_read(dtype: torch.dtype, device: torch.device) -> None:
    kernels, router = kernels_on(device), Router(6, 2, scores="logits", weighing="sigmoid", weighs_inputs=True)
    routes, x = kernels.route(randn(1, 50, 6).to(device), router, dtype), randn(2, 50, HIDDEN).to(dtype).to(device)
    routed = kernels.take_routed(x, routes, weighed=True)
    assert torch.equal(routed[routes.places], (x[:, None] * routes.weights[..., None]).to(dtype))
    summed = routed[routes.places].float().sum(1).to(dtype)
    torch.testing.assert_close(kernels.combine(routed, routes, router), summed, rtol=2**-8, atol=0)


def test_a_recorded_layer_runs_again_with_other_rows(device: torch.device) -> None:
    """All operations of a layer, in whose buffers anything was before."""
    kernels = kernels_on(device)
    into = kernels.expert_linear(dense(kernels, device, BFLOAT16, "none", True, HIDDEN)[0])
    back = kernels.expert_linear(dense(kernels, device, BFLOAT16, "none", True, WIDE // 2)[0])
    x = torch.zeros(40, HIDDEN, dtype=BFLOAT16, device=device)
    logits = torch.zeros(40, NUM_EXPERTS, device=device)

    def layer(values: Tensor, scores: Tensor) -> Tensor:
        routes = kernels.route(scores, ROUTER, BFLOAT16)
        gate_up = into(kernels.take_routed(values, routes), routes)
        with kernels.routed(routes):
            activated = kernels.clipped_swiglu(gate_up, 1.702, 7.0)
        return kernels.combine(back(activated, routes), routes, ROUTER)

    with kernels.recording() as recording:
        summed = layer(x, logits)
        program = recording.program()
    for count in (40, 1, 13, 0, 13):
        x[:count] = randn(count, count, HIDDEN).to(BFLOAT16)
        logits[:count] = randn(count + 1, count, NUM_EXPERTS)
        program.run(rows=count)
        if count:
            assert torch.equal(summed[:count], layer(x[:count], logits[:count]))


def test_experts_that_are_not_alike_are_refused(device: torch.device) -> None:
    kernels = kernels_on(device)
    linears, _ = in_few_bits(kernels, device, ["Q8_0"])
    others, _ = in_few_bits(kernels, device, ["Q4_0"])
    with pytest.raises(ValueError, match="the experts of a layer differ in shape or format"):
        kernels.expert_linear([*linears[:4], others[4]])


def test_experts_with_columns_in_orders_of_their_own(device: torch.device) -> None:
    kernels, kind = kernels_on(device), format_of("gptq 4", 256)
    linears, numbers = [], []
    for seed in range(NUM_EXPERTS):
        block = random_block(kind, 70, 256, seed)
        order = torch.randperm(256, generator=torch.Generator().manual_seed(seed)) if seed else torch.arange(256)
        weight = StoredLinear([BlockRows(kind, block, order if seed else None)], BFLOAT16)
        linears.append(RecordedLinear(GpuStoredLinear("test", weight, None, SumsWorkspace(device), FewBits()), kernels))
        dense = dequantize(block, kind)
        numbers.append(torch.empty_like(dense).index_copy_(1, order, dense))
    routes, x = routes_of(kernels, device, 20), randn(2, 20, 256).to(BFLOAT16).to(device)
    routed = kernels.take_routed(x, routes)
    found = kernels.expert_linear(linears)(routed, routes).cpu().double()
    expected = expected_rows(routed.cpu(), routes, torch.stack(numbers), None)
    magnitudes = expected_rows(routed.cpu().abs(), routes, torch.stack(numbers).abs(), None)
    assert ((found - expected).abs() <= 2**-8 * (magnitudes + expected.abs())).all()
