"""The linears of a hosted model as a device is given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from executor_svc.models.through_transformers.linears import prepare_linears

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@dataclass
class Names:
    """A builder that takes note of what it is given."""

    dtype: torch.dtype = torch.float32
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def prepare_linear(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Any:
        self.shapes[name] = tuple(weight.shape)
        return SimpleNamespace(in_features=weight.shape[1], out_features=weight.shape[0])


@pytest.mark.parametrize(
    "model",
    [
        GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=24)),
        GPT2LMHeadModel(GPT2Config(**SIZES, n_inner=24)),
    ],
    ids=["gpt_neox, whose head is embed_out", "gpt2, whose head is tied"],
)
def test_the_head_is_distinguished_from_others(model: Any) -> None:
    """A device does not quantize it."""
    builder = Names()
    prepare_linears(model, builder)
    assert builder.shapes["lm_head"] == (40, 16)
    assert "embed_out" not in builder.shapes
    assert len(builder.shapes) == 5
