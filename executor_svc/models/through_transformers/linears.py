"""Replaces the linears of a transformers model with those of the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.device.kernels import Embedding, Linear
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


class PreparedTable(Tensor):
    """Takes the place of an embedding's weight: the device looks up its rows. Code that computes with it gets NaN."""

    lookup: Embedding

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            ids, table = args[:2]
            return table.lookup(ids.reshape(-1), 1.0).view(*ids.shape, -1)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def prepare_linears(model: Any, builder: Builder) -> None:
    """Replace every linear of a model, in place; the linear of the logits gets the name lm_head on the device.

    Only exactly the known classes: a derived class may compute something else. Each weight is let go before the next
    one is prepared. A table of embeddings that is also the weight of the logits' linear is prepared once, for both.
    """
    names = [name for name, part in model.named_modules() if _class_of(part) in _KNOWN]
    for name in names:
        part = model.get_submodule(name)
        if part.weight.dtype == builder.dtype:
            model.set_submodule(name, _prepared(model, name, part, builder))


def _prepared(model: Any, name: str, part: Any, builder: Builder) -> PreparedLinear:
    weight = part.weight.detach()
    # Weights of GPT-2 are [in_features, out_features].
    weight = weight.t().contiguous() if _class_of(part) == _CONV1D else weight
    bias = None if part.bias is None else part.bias.detach()
    is_head, table = part is model.get_output_embeddings(), model.get_input_embeddings()
    if is_head and _is_tied(part, table):
        lookup, linear = builder.prepare_tied("lm_head", weight, bias)
        _replace_table(table, lookup)
    else:
        linear = builder.prepare_linear("lm_head" if is_head else name, weight, bias)
    return PreparedLinear(linear, weight.dtype, weight.device, bias is not None)


def _is_tied(head: Any, embedding: Any) -> bool:
    return isinstance(embedding, nn.Embedding) and embedding.weight is head.weight and embedding.max_norm is None


def _replace_table(embedding: Any, lookup: Embedding) -> None:
    """Make an embedding look up rows with `lookup`; a derived class may scale or normalize them after that."""
    weight = embedding.weight
    table = torch.full((), float("nan"), dtype=weight.dtype, device=weight.device).expand(weight.shape)
    replaced = table.as_subclass(PreparedTable)
    replaced.lookup = lookup
    del embedding.weight  # a parameter; what replaces it is none
    embedding.weight = replaced


def _class_of(part: nn.Module) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"
