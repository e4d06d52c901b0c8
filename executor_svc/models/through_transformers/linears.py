"""Replaces the linears of a transformers model with those of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.device.kernels import Linear
from executor_svc.models.base import Builder

_CONV1D = "transformers.pytorch_utils.Conv1D"
_KNOWN = ("torch.nn.modules.linear.Linear", _CONV1D, "transformers.models.falcon.modeling_falcon.FalconLinear")


class PreparedLinear(nn.Module):
    """Takes the place of a linear; maps [..., in_features] to [..., out_features]."""

    def __init__(self, linear: Linear, dtype: torch.dtype, device: torch.device, has_bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._linear = linear
        # For code that reads dtype or device. Code that computes with it gets NaN, which loading detects.
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self.weight = nan.expand(linear.out_features, linear.in_features)
        self.bias = nan.expand(linear.out_features) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            raise TypeError(f"a linear of {self.weight.dtype} was given {x.dtype}")
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


def prepare_linears(model: Any, builder: Builder) -> None:
    """Replace every linear of a model, in place; the linear of the logits gets the name lm_head on the device.

    Only exactly the known classes: a derived class may compute something else.
    """
    head = model.get_output_embeddings()
    found = [(name, part) for name, part in model.named_modules() if _class_of(part) in _KNOWN]
    for name, part in found:
        if part.weight.dtype != builder.dtype:
            continue
        weight = part.weight.detach()
        # Weights of GPT-2 are [in_features, out_features].
        weight = weight.t().contiguous() if _class_of(part) == _CONV1D else weight
        bias = None if part.bias is None else part.bias.detach()
        linear = builder.prepare_linear("lm_head" if part is head else name, weight, bias)
        model.set_submodule(name, PreparedLinear(linear, weight.dtype, weight.device, bias is not None))


def _class_of(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
