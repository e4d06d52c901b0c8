"""Products of experts, each beside a dense product of cuBLAS in bf16 of as many weights and rows, and their routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from benchmarks.gpu.cases import Bench, Case, Goal, Group, Metrics
from benchmarks.gpu.kernels.attention.attention_launch import arch_and_sms
from benchmarks.gpu.kernels.linears import format_of, random_block

if TYPE_CHECKING:
    from executor_svc.gpu.expert_linear import DenseExperts, FewBitsExperts
    from executor_svc.gpu.experts import GpuRoutes
    from executor_svc.gpu.linear import Quantization

Weights = Literal["none", "int8", "fp8", "fp8_w8a8", "Q4_K", "Q6_K", "mxfp4", "gptq"]
_QUANTIZATIONS = ("none", "int8", "fp8", "fp8_w8a8")
_LARGEST_ERROR = {"none": 0.01, "int8": 0.02, "fp8": 0.05, "fp8_w8a8": 0.08}
"""Relative error of rows beside bf16 weights, by L2 norm; of few bits beside the same weights in bf16 as `none`."""
_READING = 64
"""Tokens up to which the goal is to read weights as fast as a copy does, nearly."""
_CHECKED = 4
"""Experts whose rows are compared."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer of experts."""

    name: str
    num_experts: int
    num_chosen: int
    hidden: int
    intermediate: int

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """Columns and rows of an expert's matrices."""
        return {"gate_up": (self.hidden, 2 * self.intermediate), "down": (self.intermediate, self.hidden)}


_SHAPES = (
    ExpertShape("qwen3-30b-a3b", 128, 8, 2048, 768),
    ExpertShape("gpt-oss-20b", 32, 4, 2880, 2880),
    ExpertShape("olmoe", 64, 8, 2048, 1024),
)
_TINY = (ExpertShape("tiny", 4, 2, 64, 32),)


def cases(tiny: bool) -> Sequence[Case]:
    """Routing first, then bf16 of all shapes, then other weights, by tokens and matrix."""
    shapes, counts = (_TINY, (3,)) if tiny else (_SHAPES, (1, 16, 64, 256, 2048))
    others: tuple[Weights, ...] = ("int8",) if tiny else ("mxfp4", "Q4_K", "fp8", "int8", "gptq", "Q6_K", "fp8_w8a8")
    found = [_routing_case(shape, tokens) for shape in shapes for tokens in counts]
    for weights in ("none", *others):
        for shape in shapes[: None if weights in ("none", "mxfp4", "Q4_K") else 1]:
            found += [
                _case(shape, weights, layer, tokens)
                for tokens in counts
                for layer in shape.layers
                if not (weights == "Q4_K" or weights == "Q6_K") or shape.layers[layer][0] % 256 == 0
            ]
    return found


def _case(shape: ExpertShape, weights: Weights, layer: str, tokens: int) -> Case:
    name = f"{shape.name} {weights} {layer}, {tokens} tokens"
    params = {"shape": shape.name, "weights": weights, "layer": layer, "tokens": tokens}
    goal = Goal("percent_of_copy", at_least=70) if tokens <= _READING else None
    return Case(name, params, lambda bench: _time(bench, shape, weights, layer, tokens), 5.0, goal)


def _routing_case(shape: ExpertShape, tokens: int) -> Case:
    params = {"shape": shape.name, "tokens": tokens}
    return Case(
        f"{shape.name} routing, {tokens} tokens", params, lambda bench: _time_routing(bench, shape, tokens), 4.0
    )


def _time_routing(bench: Bench, shape: ExpertShape, tokens: int) -> Metrics:
    """Time the choice with the order of routed rows, and the sum of experts' rows."""
    from executor_svc.device.experts import Router
    from executor_svc.gpu.experts import GpuExpertKernels

    kernels = GpuExpertKernels(bench.device, *arch_and_sms(bench.device))
    router = Router(shape.num_experts, shape.num_chosen)
    logits = torch.randn(tokens, shape.num_experts, device=bench.device).to(torch.bfloat16)
    rows = torch.randn(tokens * shape.num_chosen, shape.hidden, device=bench.device).to(torch.bfloat16)
    with kernels.recording() as recording:
        routes = kernels.route(logits, router, torch.bfloat16)
        choosing = recording.program()
    with kernels.recording() as recording:
        kernels.combine(rows, routes, router)
        summing = recording.program()
    choosing.run(rows=tokens)
    best = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, : shape.num_chosen]
    if not torch.equal(routes.ids, best):
        raise RuntimeError("other experts were chosen than those of the highest scores")
    chosen_s = bench.clock.seconds(lambda: choosing.run(rows=tokens))
    return {"us": 1e6 * chosen_s, "combine_us": 1e6 * bench.clock.seconds(lambda: summing.run(rows=tokens))}


def _time(bench: Bench, shape: ExpertShape, weights: Weights, layer: str, tokens: int) -> Metrics:
    """Time a product of routed rows; `touched` are the experts that a random choice of each token reaches."""
    columns, rows = shape.layers[layer]
    experts, sample = bench.cached(
        f"{shape.name} {weights} {layer}", lambda: _make(bench, shape.num_experts, rows, columns, weights)
    )
    routes, routed = _route(bench, shape, tokens)
    x = torch.randn(routed, columns, device=bench.device).to(torch.bfloat16)
    out = torch.empty(routed, rows, dtype=torch.bfloat16, device=bench.device)
    narrow = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=bench.device)
    scales, blocks = torch.empty(routed, device=bench.device), routes.blocks_of(tokens)
    experts.multiply(x, out, blocks, narrow, scales, x)
    _check(weights, sample, routes, x, out)
    seconds = bench.clock.seconds(lambda: experts.multiply(x, out, blocks, narrow, scales, x))
    touched = int(routes.ids.unique().numel())
    dense_s = _time_dense(bench, touched * rows, columns, -(-routed // touched))
    size = _bytes_of(experts) * touched // shape.num_experts
    return {
        "us": 1e6 * seconds,
        "dense_us": 1e6 * dense_s,
        "speedup": dense_s / seconds,
        "percent_of_copy": 100 * size / seconds / bench.ceilings.copy,
        "tflop_per_s": 2e-12 * routed * columns * rows / seconds,
        "touched": touched,
    }


def _route(bench: Bench, shape: ExpertShape, tokens: int) -> tuple[GpuRoutes, int]:
    from executor_svc.device.experts import Router
    from executor_svc.gpu.experts import GpuExpertKernels

    kernels = GpuExpertKernels(bench.device, *arch_and_sms(bench.device))
    logits = torch.randn(tokens, shape.num_experts, device=bench.device)
    router = Router(shape.num_experts, shape.num_chosen)
    return kernels.route(logits, router, torch.bfloat16), tokens * shape.num_chosen


def _make(
    bench: Bench, num_experts: int, rows: int, columns: int, weights: Weights
) -> tuple[DenseExperts | FewBitsExperts, Tensor]:
    """Return the weights of all experts, and those of the first few in bf16: [_CHECKED, rows, columns]."""
    from executor_svc.device.dequantize import dequantize
    from executor_svc.gpu.choices.few_bits import FewBitsWays
    from executor_svc.gpu.expert_linear import DenseExperts, FewBitsExperts
    from executor_svc.gpu.kernels.few_bits.layout import FewBitsWeight
    from executor_svc.gpu.linear import SumsWorkspace, make_linear

    made, sample = [], []
    packed = []
    for expert in range(num_experts):
        if weights in _QUANTIZATIONS:
            weight = (torch.randn(rows, columns, device=bench.device) * 0.02).to(torch.bfloat16)
            made.append(make_linear(weight, None, cast("Quantization", weights), SumsWorkspace(bench.device)))
        else:
            kind = format_of(weights)
            block = random_block(kind, rows, columns, bench.device)
            packed.append(FewBitsWeight(kind, rows, columns, bench.device))
            packed[-1].write(0, block)
            weight = dequantize(block, kind).to(torch.bfloat16) if expert < _CHECKED else torch.empty(0)
        if expert < _CHECKED:
            sample.append(weight)
    if made:
        return DenseExperts.of(made), torch.stack(sample)
    zeros = torch.zeros(num_experts, rows, device=bench.device)
    return FewBitsExperts(FewBitsWeight.together(packed), zeros, False, FewBitsWays()), torch.stack(sample)


def _bytes_of(experts: DenseExperts | FewBitsExperts) -> int:
    from executor_svc.gpu.expert_linear import FewBitsExperts

    return experts.weight.num_bytes if isinstance(experts, FewBitsExperts) else experts.weight.nbytes


def _check(weights: Weights, sample: Tensor, routes: GpuRoutes, x: Tensor, out: Tensor) -> None:
    for expert, weight in enumerate(sample):
        mine = routes.places[routes.ids == expert]
        if not len(mine):
            continue
        expected = x[mine].float() @ weight.float().t()
        error = float((out[mine].float() - expected).norm() / expected.norm())
        if not error < _LARGEST_ERROR.get(weights, _LARGEST_ERROR["none"]):
            raise RuntimeError(f"{weights} is wrong: relative error {error:.3g} beside bf16 weights")


def _time_dense(bench: Bench, rows: int, columns: int, count: int) -> float:
    """Return the seconds of `count` rows times a weight [rows, columns] in bf16."""
    weight = torch.randn(rows, columns, device=bench.device, dtype=torch.bfloat16)
    x = torch.randn(count, columns, device=bench.device, dtype=torch.bfloat16)
    out = torch.empty(count, rows, device=bench.device, dtype=torch.bfloat16)
    return bench.clock.seconds(lambda: torch.mm(x, weight.t(), out=out))


GROUP = Group("experts", "products of experts beside dense ones, and their routing", cases, limit_s=180)
