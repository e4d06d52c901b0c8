"""Reads a layer's experts: each linear by itself, in whatever format the checkpoint has it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.device.experts import ExpertKernels, ExpertLinear
from executor_svc.device.file_rows import NotInPlaceError
from executor_svc.device.kernels import Linear
from executor_svc.models.base import Builder, ModelConfigError, WeightSource
from executor_svc.models.layers.experts import ExpertChoice, Experts, ExpertsBeside
from executor_svc.models.layers.mlp import GATED, PLAIN, GatedMlp, Mlp, PlainMlp
from executor_svc.models.layers.norm import RmsNorm
from executor_svc.models.parallel.building import RankBuilder
from executor_svc.models.specs.spec import DecoderSpec, ExpertsSpec, into_rows
from executor_svc.models.weights.linear_weight import linear_weight


class ExpertsWeights:
    """Builds layers of experts; each linear is read as that of a dense model is."""

    def __init__(self, spec: DecoderSpec, weights: WeightSource, builder: Builder) -> None:
        self._spec, self._weights, self._builder = spec, weights, builder
        kernels = builder.kernels
        assert isinstance(kernels, ExpertKernels), "this device has no kernels of experts"
        self._kernels: ExpertKernels = kernels

    def layer(self, prefix: str, experts: ExpertsSpec) -> Experts:
        """Return the experts of a layer; prefix: of its tensors."""
        names, hidden = experts.names, self._spec.hidden_size
        into = into_rows(names.into, experts.intermediate_size, experts.gated)
        down = {names.down: hidden}
        shared: Mlp | None = None
        gate: Linear | None = None
        choice = self._choice(prefix, experts)
        gate_up = self._each(prefix, experts, into, hidden)
        second = self._each(prefix, experts, down, experts.intermediate_size)
        if experts.shared_size:
            shared = self._shared(prefix, experts)
            if names.shared_gate is not None:
                gate = self._small(f"{prefix}{names.shared_gate}", (1, hidden), self._builder.dtype)
        ranks = self._builder.ranks if isinstance(self._builder, RankBuilder) else None
        return Experts(choice, gate_up, second, self._activate(experts), shared, gate, self._kernels, ranks)

    def beside(self, prefix: str, experts: ExpertsSpec, norm: Callable[[str], RmsNorm]) -> ExpertsBeside:
        """Return the experts beside a layer's MLP; norm: returns one of the layer's by its name in it."""
        names, kernels, size = experts.names, self._kernels, self._spec.hidden_size
        assert names.beside is not None
        assert names.router_scale is not None
        scale = self._weights.get(prefix + names.router_scale, (size,)).float() / math.sqrt(size)
        chooses_by = RmsNorm(scale, self._spec.norm_eps, kernels)
        beside = names.beside
        norms = norm(beside.before), norm(beside.after), norm(beside.after_mlp)
        return ExpertsBeside(self.layer(prefix, experts), chooses_by, *norms, kernels)

    def _choice(self, prefix: str, experts: ExpertsSpec) -> ExpertChoice:
        count, names = experts.router.num_experts, experts.names
        dtype = torch.float32 if experts.router_in_float32 else self._builder.dtype
        linear = self._small(prefix + names.router, (count, self._spec.hidden_size), dtype, experts.biased)
        bias: Tensor | None = None
        scales: Tensor | None = None
        if names.choice_bias is not None:
            shape = (1, count) if names.choice_bias_row else (count,)
            bias = self._weights.get(prefix + names.choice_bias, shape, torch.float32).flatten()
        if names.weight_scales is not None:
            scales = self._weights.get(prefix + names.weight_scales, (count,)).float()
        return ExpertChoice(linear, experts.router, experts.router_in_float32, bias, scales)

    def _small(self, name: str, shape: tuple[int, int], dtype: torch.dtype, biased: bool = False) -> Linear:
        """Return a dense linear of few rows."""
        wanted = None if dtype == self._builder.dtype else dtype
        weight = self._weights.get(f"{name}.weight", shape, wanted)
        bias = self._weights.get(f"{name}.bias", shape[:1], wanted) if biased else None
        return self._builder.prepare_linear("experts.router", weight, bias)

    def _each(self, prefix: str, experts: ExpertsSpec, rows: dict[str, int], columns: int) -> ExpertLinear:
        """Return the fused linears of these names, one for each expert that is this rank's."""
        linears = [
            self._linear(
                "experts",
                {prefix + name.format(expert): count for name, count in rows.items()},
                columns,
                experts.biased,
            )
            for expert in experts.own
        ]
        try:
            return self._kernels.expert_linear(linears)
        except ValueError as error:
            first = prefix + next(iter(rows)).format(experts.own[0])
            raise ModelConfigError(f"{first} and others: {error}") from None

    def _linear(self, name: str, rows: dict[str, int], columns: int, biased: bool = False) -> Linear:
        parts = [self._weights.open_linear(each, (count, columns)) for each, count in rows.items()]
        bias = None
        if biased:
            bias = torch.cat([self._weights.get(f"{each}.bias", (count,)) for each, count in rows.items()])
        try:
            return self._builder.prepare_linear(name, linear_weight(parts, self._builder.dtype), bias)
        except NotInPlaceError as error:
            raise ModelConfigError(f"--expert-weights mapped: {next(iter(rows))}: {error}") from None

    def _shared(self, prefix: str, experts: ExpertsSpec) -> Mlp:
        names, hidden, activation = experts.names, self._spec.hidden_size, self._spec.activation
        rows, biased = into_rows(names.shared_into, experts.shared_size, experts.gated), experts.shared_biased
        gate_up = self._linear("shared.gate_up", {prefix + name: count for name, count in rows.items()}, hidden, biased)
        down = self._linear("shared.down", {prefix + names.shared_down: hidden}, experts.shared_size, biased)
        if not experts.gated:
            assert activation in PLAIN
            return PlainMlp(gate_up, down, activation, None, self._kernels)
        assert activation in GATED
        return GatedMlp(gate_up, down, activation, self._kernels)

    def _activate(self, experts: ExpertsSpec) -> Callable[[Tensor], Tensor]:
        clipped, plain = experts.activation, self._spec.activation
        if clipped is not None:
            return lambda gate_up: self._kernels.clipped_swiglu(gate_up, clipped.alpha, clipped.limit)
        if not experts.gated:
            assert plain in PLAIN
            return lambda up: self._kernels.activate(up, plain)
        activations = {"silu": self._kernels.silu_mul, "gelu_tanh": self._kernels.gelu_tanh_mul}
        return activations[self._spec.activation]
