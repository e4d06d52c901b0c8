"""Parts of adapters for linears with widened heads."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from executor_svc.device.kernels import AttentionShape
from executor_svc.models.adapters.adapter import LoraPart
from executor_svc.models.adapters.places import pad_part
from executor_svc.models.layers.attention import HeadRows, pad_output

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=12, padded_head_size=16, scale=1.0)


@pytest.mark.parametrize("pairs", [0, 8])
@pytest.mark.parametrize("linear", ["attention.qkv", "attention.output"])
def test_a_padded_part_adds_to_the_padded_weight(
    linear: Literal["attention.qkv", "attention.output"], pairs: int
) -> None:
    random = torch.Generator().manual_seed(0)
    q, kv, hidden = 48, 24, 10
    rows, columns, first_row = (kv, hidden, q + kv) if linear == "attention.qkv" else (hidden, q, 0)
    weight = torch.randn(q + 2 * kv if linear == "attention.qkv" else hidden, columns, generator=random)
    a, b = torch.randn(3, columns, generator=random), torch.randn(rows, 3, generator=random)
    whole = torch.zeros_like(weight)
    whole[first_row : first_row + rows] = b @ a * 0.5

    part = pad_part(LoraPart("v_proj", a, b, 0.5, first_row), linear, SHAPE, pairs)
    if linear == "attention.qkv":
        padded, expected = (HeadRows(12, 16, pairs)(each) for each in (weight, weight + whole))
    else:
        padded, expected = pad_output(weight, SHAPE), pad_output(weight + whole, SHAPE)
    padded[part.first_row : part.first_row + len(part.b)] += part.b @ part.a * part.scale
    torch.testing.assert_close(padded, expected)


def test_other_linears_and_heads_without_padding_stay() -> None:
    part = LoraPart("gate_proj", torch.ones(2, 3), torch.ones(4, 2), 1.0, 0)
    assert pad_part(part, "mlp.gate_up", SHAPE) is part
