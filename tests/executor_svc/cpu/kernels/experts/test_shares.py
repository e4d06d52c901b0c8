"""The experts of one rank: their rows come first, those of other ranks are left out, and parts add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch

from executor_svc.cpu.kernels.experts.kernels import CpuExpertKernels, CpuRoutes
from executor_svc.cpu.kernels.linear import CpuLinear
from executor_svc.device.experts import Router, own_experts
from executor_svc.device.ranks import Share

EXPERTS, HIDDEN = 7, 72
ROUTER = Router(EXPERTS, 3, rounded=False)


def weights() -> list[torch.Tensor]:
    return list(torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)))


def routed(kernels: CpuExpertKernels, rows: int, share: Share) -> tuple[torch.Tensor, CpuRoutes]:
    generator = torch.Generator().manual_seed(rows)
    x, logits = (torch.randn(rows, columns, generator=generator) for columns in (HIDDEN, EXPERTS))
    return x, kernels.route(logits, ROUTER, torch.float32, share=share)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, 400])
def test_routed_rows_are_those_of_a_rank_alone(size: int, rows: int) -> None:
    kernels = CpuExpertKernels(2)
    for rank in range(size):
        own = list(own_experts(EXPERTS, Share(rank, size)))
        _, routes = routed(kernels, rows, Share(rank, size))
        ids = routes.ids.tolist()
        chosen = sorted((expert, token) for token, each in enumerate(ids) for expert in each if expert in own)
        blocks, count, pairs = routes.counts.tolist()
        assert (count, pairs) == (len(chosen), math.ceil(len(chosen) / 2))
        assert routes.sources[:count].tolist() == [token for _, token in chosen]
        for token, experts in enumerate(ids):
            for expert, place in zip(experts, routes.places[token].tolist(), strict=True):
                assert place == -1 if expert not in own else chosen[place] == (expert, token)
        found = [
            (own[each], row) for each, first, number, _ in routes.blocks[:blocks].tolist() for row in range(number)
        ]
        assert [expert for expert, _ in found] == [expert for expert, _ in chosen]


@pytest.mark.parametrize("with_beside", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_add_up_to_the_whole(size: int, with_beside: bool) -> None:
    """What is beside has a part on each rank, too; its gate is the same on all."""
    kernels, rows = CpuExpertKernels(2), 150
    generator = torch.Generator().manual_seed(9)
    besides = [torch.randn(rows, HIDDEN, generator=generator) for _ in range(size)] if with_beside else None
    gate = torch.randn(rows, 1, generator=generator) if with_beside else None
    parts = []
    for rank in range(size):
        share = Share(rank, size)
        linears = [CpuLinear(weights()[expert], None, kernels) for expert in own_experts(EXPERTS, share)]
        x, routes = routed(kernels, rows, share)
        taken = kernels.take_routed(x, routes)
        taken[int(routes.counts[1]) :] = math.nan
        found = kernels.expert_linear(linears)(taken, routes)
        parts.append(kernels.combine(found, routes, ROUTER, None if besides is None else besides[rank], gate))
    x, routes = routed(kernels, rows, Share())
    product = kernels.expert_linear([CpuLinear(weight, None, kernels) for weight in weights()])
    beside = None if besides is None else torch.stack(besides).sum(0)
    whole = kernels.combine(product(kernels.take_routed(x, routes), routes), routes, ROUTER, beside, gate)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=1e-5, atol=1e-5)


def test_a_recorded_layer_of_a_rank_runs_again_with_other_rows() -> None:
    """Its rows, activations included, are counted in memory: none, or all that chose."""
    kernels, share = CpuExpertKernels(2), Share(1, 2)
    matrices = [weights()[expert] for expert in own_experts(EXPERTS, share)]
    into = kernels.expert_linear([CpuLinear(torch.cat([each, each.t()]), None, kernels) for each in matrices])
    down = kernels.expert_linear([CpuLinear(each, None, kernels) for each in matrices])

    def layer(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        routes = kernels.route(logits, ROUTER, torch.float32, share=share)
        gate_up = into(kernels.take_routed(x, routes), routes)
        with kernels.routed(routes):
            activated = kernels.silu_mul(gate_up)
        return kernels.combine(down(activated, routes), routes, ROUTER)

    x, logits = torch.zeros(40, HIDDEN), torch.zeros(40, EXPERTS)
    with kernels.recording() as recording:
        summed = layer(x, logits)
        program = recording.program()
    generator = torch.Generator().manual_seed(3)
    for count in (40, 1, 13, 0, 2):
        x[:count], logits[:count] = (torch.randn(count, width, generator=generator) for width in (HIDDEN, EXPERTS))
        if count == 2:
            logits[:count, 1::2] = -100.0  # nobody chooses this rank's
        program.run(rows=count)
        if count:
            assert torch.equal(summed[:count], layer(x[:count], logits[:count]))
    assert not summed[:2].any()
