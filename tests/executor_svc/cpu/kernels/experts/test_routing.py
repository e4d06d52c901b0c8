"""The experts that rows choose, and the order of routed rows, against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels
from executor_svc.cpu.kernels.panel_layout import ROWS_AT_ONCE
from executor_svc.device import reference
from executor_svc.device.experts import Router

KERNELS = CpuExpertKernels(2)

ROUTERS = {
    "qwen": Router(60, 4, weighing="scores"),
    "qwen3": Router(128, 8),
    "mixtral": Router(8, 2, rounded=False),
    "gpt-oss": Router(32, 4, scores="logits", weighing="softmax"),
    "granite": Router(40, 8, scores="logits", weighing="softmax"),
    "deepseek v3": Router(64, 6, scores="sigmoid", groups=8, kept_groups=4, epsilon=1e-20, factor=2.5, rounded=False),
    "deepseek v2": Router(
        64, 6, weighing="scores", groups=8, kept_groups=3, two_best=False, factor=16.0, rounded=False
    ),
    "lfm2": Router(32, 4, scores="sigmoid", rounded_scores=True, epsilon=1e-6),
    "ernie": Router(64, 6, least_sum=1e-12),
    "gemma 4": Router(128, 8, rounded=False),
    "llama 4": Router(16, 1, scores="logits", weighing="sigmoid", weighs_inputs=True),
    "phi": Router(16, 2, scores="logits", weighing="sparsemixer", jitter=0.3),
    "odd": Router(5, 3, scores="sigmoid"),
    "few in a group": Router(6, 2, scores="sigmoid", groups=6, kept_groups=3, rounded=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_choices_and_weights(name, dtype):
    router, generator = ROUTERS[name], torch.Generator().manual_seed(len(name))
    logits = (2 * torch.randn(33, router.num_experts, generator=generator)).to(dtype)  # bfloat16 has equal ones
    bias = torch.randn(router.num_experts, generator=generator) if router.scores == "sigmoid" else None
    scales = 1 + torch.rand(router.num_experts, generator=generator) if name in ("mixtral", "gemma 4") else None
    routes = KERNELS.route(logits, router, dtype, bias, scales)
    ids, weights = reference.route(logits, router, dtype, bias, scales)
    assert torch.equal(routes.ids, ids)
    tolerance = 2e-6 if not router.rounded or dtype == torch.float32 else 2**-8
    torch.testing.assert_close(routes.weights, weights, rtol=tolerance, atol=1e-7)


def test_equal_scores_go_to_the_lower_index():
    routes = KERNELS.route(torch.zeros(3, 128), ROUTERS["qwen3"], torch.float32)
    assert routes.ids.tolist() == [list(range(8))] * 3
    assert torch.equal(routes.weights, torch.full((3, 8), 0.125))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_chooses_experts_that_there_are_and_changes_no_other_row(name, value):
    router, generator = ROUTERS[name], torch.Generator().manual_seed(3)
    logits = torch.randn(4, router.num_experts, generator=generator)
    alone = KERNELS.route(logits, router, torch.float32)
    spoilt = logits.clone()
    spoilt[1] = value
    spoilt[2, 1] = value
    routes = KERNELS.route(spoilt, router, torch.float32)
    assert ((routes.ids >= 0) & (routes.ids < router.num_experts)).all()
    for row in (0, 3):
        assert torch.equal(routes.ids[row], alone.ids[row])
        assert torch.equal(routes.weights[row], alone.weights[row])


@pytest.mark.parametrize("num_rows", [1, 7, 500])
@pytest.mark.parametrize("one", [False, True])
def test_routed_rows_are_in_the_order_of_experts_and_tokens(num_rows, one):
    """one: all rows choose the same experts."""
    router = Router(12, 3)
    logits = torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(num_rows))
    routes = KERNELS.route(logits[:1].repeat(num_rows, 1) if one else logits, router, torch.float32)
    chosen = sorted((expert, token) for token, experts in enumerate(routes.ids.tolist()) for expert in experts)
    assert routes.sources.tolist() == [token for _, token in chosen]
    for token, (experts, places) in enumerate(zip(routes.ids.tolist(), routes.places.tolist(), strict=True)):
        assert [chosen[place] for place in places] == [(expert, token) for expert in experts]
    blocks = routes.blocks[: int(routes.counts[0])].tolist()
    found = [(expert, row) for expert, first, rows, _ in blocks for row in range(first, first + rows)]
    assert found == [(expert, row) for row, (expert, _) in enumerate(chosen)]
    assert all(1 <= rows <= ROWS_AT_ONCE for _, _, rows, _ in blocks)
    assert [block[3] for block in blocks] == [*(block[0] for block in blocks[1:]), blocks[-1][0]]
    x = torch.randn(num_rows, 40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(KERNELS.take_routed(x, routes), x[routes.sources])
