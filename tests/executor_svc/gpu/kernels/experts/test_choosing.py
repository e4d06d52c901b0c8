"""The experts that rows choose on a GPU, and the order of routed rows, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.experts import Router
from executor_svc.gpu.experts import GpuExpertKernels, GpuRoutes
from executor_svc.gpu.kernels.experts.blocks import BLOCK_ROWS, block_rows, most_blocks, tokens_of_blocks
from tests.executor_svc.cpu.kernels.experts.test_routing import ROUTERS


def route(device: torch.device, logits: Tensor, router: Router, dtype: torch.dtype = torch.float32) -> GpuRoutes:
    return GpuExpertKernels(device, 90, 132).route(logits.to(device), router, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, router in ROUTERS.items() if GpuExpertKernels.has_router(router)])
def test_choices_and_weights(name: str, dtype: torch.dtype, device: torch.device) -> None:
    router, generator = ROUTERS[name], torch.Generator().manual_seed(len(name))
    logits = (2 * torch.randn(33, router.num_experts, generator=generator)).to(dtype)  # bfloat16 has equal ones
    bias = torch.randn(router.num_experts, generator=generator) if router.scores == "sigmoid" else None
    scales = 1 + torch.rand(router.num_experts, generator=generator) if name == "mixtral" else None
    kernels = GpuExpertKernels(device, 90, 132)
    on_device = (None if each is None else each.to(device) for each in (bias, scales))
    routes = kernels.route(logits.to(device), router, dtype, *on_device)
    ids, weights = reference.route(logits, router, dtype, bias, scales)
    assert torch.equal(routes.ids.cpu(), ids)
    tolerance = 2e-6 if not router.rounded or dtype == torch.float32 else 2**-7
    torch.testing.assert_close(routes.weights.cpu(), weights, rtol=tolerance, atol=1e-7)


def test_equal_scores_go_to_the_lower_index(device: torch.device) -> None:
    routes = route(device, torch.zeros(3, 128), ROUTERS["qwen3"])
    assert routes.ids.tolist() == [list(range(8))] * 3
    assert torch.equal(routes.weights.cpu(), torch.full((3, 8), 0.125))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek v3"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_chooses_experts_that_there_are_and_changes_no_other_row(
    name: str, value: float, device: torch.device
) -> None:
    router, generator = ROUTERS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(4, router.num_experts, generator=generator)
    alone = route(device, logits, router)
    spoilt = logits.clone()
    spoilt[1] = value
    spoilt[2, 1] = value
    routes = route(device, spoilt, router)
    for row in routes.ids.tolist():
        assert len(set(row)) == router.num_chosen
        assert all(0 <= expert < router.num_experts for expert in row)
    for row in (0, 3):
        assert torch.equal(routes.ids[row], alone.ids[row])
        assert torch.equal(routes.weights[row], alone.weights[row])


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 12), (16, 12), (17, 12), (300, 40), (5, 2000)])
@pytest.mark.parametrize("one", [False, True])
def test_routed_rows_are_in_the_order_of_experts_and_tokens(
    num_rows: int, num_experts: int, one: bool, device: torch.device
) -> None:
    """one: all rows choose the same experts."""
    router = Router(num_experts, 3)
    logits = torch.randn(num_rows, num_experts, generator=torch.Generator().manual_seed(num_rows))
    routes = route(device, logits[:1].repeat(num_rows, 1) if one else logits, router)
    chosen = sorted((expert, token) for token, experts in enumerate(routes.ids.tolist()) for expert in experts)
    assert routes.sources.tolist() == [token for _, token in chosen]
    for token, (experts, places) in enumerate(zip(routes.ids.tolist(), routes.places.tolist(), strict=True)):
        assert [chosen[place] for place in places] == [(expert, token) for expert in experts]
    wanted = routes.blocks_of(num_rows)
    count = int(routes.num_blocks)
    assert count <= wanted.most
    blocks = routes.blocks[:count].tolist()
    found = [(expert, row) for expert, first, rows, _ in blocks for row in range(first, first + rows)]
    assert found == [(expert, row) for row, (expert, _) in enumerate(chosen)]
    assert all(1 <= rows <= wanted.rows for _, _, rows, _ in blocks)
    kernels = GpuExpertKernels(device, 90, 132)
    x = torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(kernels.take_routed(x, routes), x[routes.sources])


def test_a_block_has_half_as_many_rows_more_than_an_expert_on_average() -> None:
    assert block_rows(1, 128, 8) == 8
    assert block_rows(128, 128, 8) == 16
    assert block_rows(1 << 20, 8, 2) == BLOCK_ROWS[-1]
    for experts, chosen in ((128, 8), (32, 4), (8, 2), (5, 3)):
        for tokens, rows in zip(tokens_of_blocks(experts, chosen), BLOCK_ROWS, strict=False):
            assert block_rows(tokens, experts, chosen) <= rows < block_rows(tokens + 1, experts, chosen) or tokens == 1
    assert most_blocks(1, 128, 8) == 8
    assert most_blocks(40, 4, 2) == 4 + 76 // 32
