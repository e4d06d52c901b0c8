"""The linears of a hosted model as a device is given them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
)

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
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

    def prepare_tied(self, name: str, weight: Tensor, bias: Tensor | None = None) -> Any:
        return None, self.prepare_linear(name, weight, bias)


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


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (GPT2LMHeadModel, GPT2Config(**SIZES | {"vocab_size": 4001})),
        (
            BioGptForCausalLM,
            BioGptConfig(**SIZES | {"vocab_size": 4001}, intermediate_size=24, tie_word_embeddings=True),
        ),
    ],
    ids=["gpt2", "biogpt, which scales what it looks up"],
)
def test_a_tied_table_is_held_once_and_every_weight_let_go(model_class: Any, config: Any) -> None:
    """As panels: neither the table nor another weight of PyTorch's linears stays; same rows, like logits."""
    model = model_class(config).eval().requires_grad_(False)
    ids = torch.tensor([[3, 4000, 0, 3, 1777]])
    table, others = model.get_input_embeddings(), [part for part in model.modules() if hasattr(part, "weight")]
    rows, logits = table(ids), model(ids).logits
    linears = [part for part in others if type(part).__name__ in ("Linear", "Conv1D")]
    held = [weakref.ref(part.weight) for part in linears] + [weakref.ref(table.weight)]
    del linears, others
    prepare_linears(model, CpuDevice(ExecutorConfig(model="unused", num_threads=1)))
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    assert table.weight.lookup._linear is model.get_output_embeddings()._linear
    assert torch.equal(table(ids), rows)
    assert type(table(ids)) is Tensor
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_code_that_computes_with_the_table_gets_nan() -> None:
    """Loading then refuses the model, instead of computing with rows in another order."""
    model = GPT2LMHeadModel(GPT2Config(**SIZES)).requires_grad_(False)
    prepare_linears(model, CpuDevice(ExecutorConfig(model="unused", num_threads=1)))
    weight = model.get_input_embeddings().weight
    assert (tuple(weight.shape), weight.dtype) == ((40, 16), torch.float32)
    assert bool(torch.nn.functional.linear(torch.ones(2, 16), weight).isnan().all())
