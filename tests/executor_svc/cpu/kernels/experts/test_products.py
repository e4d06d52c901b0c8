"""The linears of experts have the bits of each alone, whatever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch

from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.cpu.stored_linear import CpuStoredLinear, QuantizedActivations
from executor_svc.device import reference
from executor_svc.device.experts import Router
from executor_svc.device.stored_linear import StoredLinear
from tests.executor_svc.cpu.kernels.quantized.formats import format_of, random_block
from tests.executor_svc.cpu.kernels.quantized.formats_in_memory import BlockRows

ROUTER = Router(6, 2)
HIDDEN = WIDE = 72


def linears(kernels: CpuExpertKernels, dtype: torch.dtype, biased: bool = False) -> list[CpuLinear]:
    generator = torch.Generator().manual_seed(5)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [CpuLinear(tensor(WIDE, HIDDEN), tensor(WIDE) if biased else None, kernels) for _ in range(6)]


def rows(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_row_is_that_of_its_expert_alone(dtype, biased, threads):
    kernels = CpuExpertKernels(threads)
    experts = linears(kernels, dtype, biased)
    product = kernels.expert_linear(experts)
    x, logits = rows(200, dtype), torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    routes = kernels.route(logits, ROUTER, dtype)
    routed = kernels.take_routed(x, routes)
    whole = product(routed, routes)
    for token in (0, 1, 77, 199):
        alone = kernels.route(logits[token : token + 1], ROUTER, dtype)
        found = product(kernels.take_routed(x[token : token + 1], alone), alone)
        for choice in range(2):
            own = found[alone.places[0, choice]]
            assert torch.equal(whole[routes.places[token, choice]], own)
            linear = experts[int(routes.ids[token, choice])]
            assert torch.equal(own, linear(x[token : token + 1])[0])


def test_an_expert_that_nobody_chose_is_not_read():
    kernels = CpuExpertKernels(2)
    experts = linears(kernels, torch.float32)
    experts[3].panels.fill_(math.nan)
    product = kernels.expert_linear(experts)
    logits = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    logits[:, 3] = -100.0
    routes = kernels.route(logits, ROUTER, torch.float32)
    assert product(kernels.take_routed(rows(64, torch.float32), routes), routes).isfinite().all()


def in_few_bits(kernels: CpuExpertKernels, name: str, option: QuantizedActivations) -> list[CpuStoredLinear]:
    """Two parts of random codes for each expert, one below the other."""
    found = []
    for seed in range(6):
        parts = [
            BlockRows(format_of(name, 256), random_block(format_of(name, 256), 40, 256, 2 * seed + part))
            for part in range(2)
        ]
        linear = CpuStoredLinear("test", StoredLinear(parts, torch.bfloat16), None, kernels, option)
        linear.read()
        found.append(linear)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("option", ["off", "int8"])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "mxfp4", "gptq 4"])
def test_experts_in_few_bits_have_the_bits_of_each_linear(name, option):
    kernels = CpuExpertKernels(2)
    experts = in_few_bits(kernels, name, option)
    product = kernels.expert_linear(experts)
    x = torch.randn(90, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    routes = kernels.route(torch.randn(90, 6, generator=torch.Generator().manual_seed(2)), ROUTER, torch.bfloat16)
    routed = kernels.take_routed(x, routes)
    found = product(routed, routes)
    for expert, linear in enumerate(experts):
        mine = routes.places[routes.ids == expert]
        assert torch.equal(found[mine], linear(routed[mine]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_sum_is_that_of_the_reference(dtype, rounded):
    kernels = CpuExpertKernels(2)
    router = Router(6, 4, rounded=rounded)
    routes = kernels.route(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), router, dtype)
    x = torch.randn(200, HIDDEN + 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = reference.combine(x[routes.places], routes.weights)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(kernels.combine(x, routes, router).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_may_multiply_what_experts_read(dtype):
    kernels, router = CpuExpertKernels(2), Router(6, 2, scores="logits", weighing="sigmoid", weighs_inputs=True)
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    routes, x = kernels.route(logits, router, dtype), rows(50, dtype)
    routed = kernels.take_routed(x, routes, weighed=True)
    assert torch.equal(routed[routes.places], (x[:, None] * routes.weights[..., None]).to(dtype))
    summed = routed[routes.places].float().sum(1).to(dtype)
    torch.testing.assert_close(kernels.combine(routed, routes, router), summed, rtol=2**-8, atol=0)


def test_a_recorded_layer_runs_again_with_other_rows():
    kernels = CpuExpertKernels(2)
    product = kernels.expert_linear(linears(kernels, torch.bfloat16))
    x, logits = torch.zeros(40, HIDDEN, dtype=torch.bfloat16), torch.zeros(40, 6)
    with kernels.recording() as recording:
        routes = kernels.route(logits, ROUTER, torch.bfloat16)
        summed = kernels.combine(product(kernels.take_routed(x, routes), routes), routes, ROUTER)
        program = recording.program()
    for count in (40, 1, 13, 0, 13):
        x[:count] = rows(40, torch.bfloat16)[:count]
        logits[:count] = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        program.run(rows=count)
        alone = kernels.route(logits[:count], ROUTER, torch.bfloat16) if count else None
        if alone is not None:
            expected = kernels.combine(product(kernels.take_routed(x[:count], alone), alone), alone, ROUTER)
            assert torch.equal(summed[:count], expected)


def test_a_late_thread_finds_the_number_of_blocks_of_its_own_layer():
    """Others may be layers ahead: with one number for all of them it would wait for blocks that there are not."""
    kernels = CpuExpertKernels(4)
    product = kernels.expert_linear(linears(kernels, torch.float32))
    x, few = rows(40, torch.float32), torch.zeros(40, 6)
    many = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    with kernels.recording() as recording:
        summed = x
        for logits in [few, many] * 6:
            routes = kernels.route(logits, ROUTER, torch.float32)
            summed = kernels.combine(product(kernels.take_routed(summed, routes), routes), routes, ROUTER)
        counted = [launch.counted_at for launch in recording.launches if launch.counted_at]
        program = recording.program()
    assert len(set(counted)) == 12
    program.run(rows=40)
    expected = summed.clone()
    for _ in range(200):
        program.run(rows=40)
    assert torch.equal(summed, expected)
