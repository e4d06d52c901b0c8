"""Checks that a model's logits with Cadenza's attention equal those with transformers' own attention.

Two texts run in chunks in the same steps: a model that mixes sequences, or keeps state, has other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from executor_svc.models.base import Builder, CausalLM, ModelConfigError

_TEXTS = (37, 21)
_STEPS = ((0, 20), (1, 9)), ((0, 14), (1, 12)), ((0, 1),), ((0, 1),), ((0, 1),)
"""Step by step: (index of a text, number of its next tokens)."""

_PARTS = (20, 14, 3), (9, 12)
"""Numbers of tokens of each text that are compared together: its chunks, and its steps of one token."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Maximum error of a row, relative to its spread; a wrong window, scale or position causes far larger errors."""


def sample_texts(vocab_size: int, max_model_len: int) -> list[Tensor]:
    """Return the token ids [T] int64 of the texts."""
    lengths = [min(length, max_model_len) for length in _TEXTS]
    return [(torch.arange(n) * 7919 + 13 + 101 * i) % vocab_size for i, n in enumerate(lengths)]


@torch.inference_mode()
def own_logits(model: Any, texts: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits [T, vocabulary] float32 of texts from an unchanged model of transformers."""
    return [model(input_ids=text[None].to(model.device), use_cache=False).logits[0].float() for text in texts]


@torch.inference_mode()
def paged_logits(
    model: CausalLM, texts: Sequence[Tensor], builder: Builder, max_model_len: int, block_size: int
) -> list[Tensor]:
    """Return the same logits with Cadenza's attention, over a temporary cache.

    max_model_len and block_size: as in service, so that the kernels are compiled before the first step.
    """
    shape, device = model.attention_shapes[0], builder.torch_device
    blocks_each = -(-max(len(text) for text in texts) // block_size)
    size = (len(texts) * blocks_each, 2, shape.num_kv_heads, block_size, shape.padded_head_size)
    cache = [torch.zeros(size, dtype=builder.dtype, device=device) for _ in range(model.num_layers)]
    tables = torch.arange(len(texts) * blocks_each, dtype=torch.int32).view(len(texts), blocks_each).flip(1)
    most = sum(len(text) for text in texts)
    plans = [builder.kernels.new_attention_plan(shape, max_model_len, most) for shape in model.attention_shapes]
    at = torch.zeros(most, dtype=torch.int64, device=device)
    ropes = model.new_ropes(at)
    done = [0] * len(texts)
    rows: list[list[Tensor]] = [[] for _ in texts]
    for step in _STEPS:
        work = [(i, done[i], min(count, len(texts[i]) - done[i])) for i, count in step if done[i] < len(texts[i])]
        if not work:
            break
        positions = torch.cat([torch.arange(start, start + count) for _, start, count in work])
        owners = torch.cat([torch.full((count,), i) for i, _, count in work])
        slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
        starts = torch.tensor([0, *(count for *_, count in work)]).cumsum(0).int()
        lens = torch.tensor([start + count for _, start, count in work], dtype=torch.int32)
        for plan in plans:
            plan.fill(slots, starts, lens, tables[[i for i, *_ in work]])
        at[: len(positions)] = positions
        model.fill_ropes(positions, positions + 1, ropes)
        ids = torch.cat([texts[i][start : start + count] for i, start, count in work]).to(device)
        logits = model.logits(model.forward(ids, ropes, cache, plans))
        for (i, _, count), part in zip(work, logits.split([count for *_, count in work]), strict=True):
            rows[i].append(part)
            done[i] += count
    return [torch.cat(parts) for parts in rows]


def check_logits(wanted: Sequence[Tensor], found: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise ModelConfigError unless the logits are equal within the tolerance.

    The median row of each part counts: in mixtures of experts, rounding may send a token to another expert.
    """
    worst = 0.0
    for expected, paged, parts in zip(wanted, found, _PARTS, strict=True):
        errors = (paged - expected).square().mean(1).sqrt() / expected.std(1).clamp_min(1e-30)
        for rows in errors.nan_to_num(float("inf")).split(_cut(parts, len(errors))):
            worst = max(worst, float(rows.median()))
    if worst > _TOLERANCE[dtype]:
        raise ModelConfigError(
            f"with Cadenza's attention its logits differ from transformers' own by {worst:.2g} of their spread"
        )


def _cut(parts: Sequence[int], total: int) -> list[int]:
    """Return the sizes of parts, cut to a text of `total` tokens."""
    ends = [min(total, sum(parts[: i + 1])) for i in range(len(parts))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]
