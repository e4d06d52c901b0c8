"""Attention by PyTorch against its float64 meaning, over caches full of NaN wherever nothing may be read."""

from __future__ import annotations

import pytest
import torch

from executor_svc.gpu.kernels.attention import by_torch
from executor_svc.gpu.kernels.attention.by_torch import attention_by_torch
from tests.executor_svc.gpu.kernels.attention.cases import F8, Chunks, Sizes, check, make_call, make_latent_call

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MIXED: Chunks = [(70, 1), (0, 0), (0, 33), (0, 1), (-1, 3), (40, 21), (129, 1)]
"""Decodes, a whole prompt, a chunk in the middle, one without tokens, and three tokens of padding."""


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(2, 3), Sizes(1, 1, 128, 64, F32), Sizes(2, 2, dtype=F16, kv_dtype=F8), Sizes(2, 2, window=37),
        Sizes(2, 2, dtype=F32, softcap=5.0), Sizes(1, 4, sinks=True), Sizes(2, 2, chunk=32),
        Sizes(group=4, latent=20, head_size=8, dtype=F32), Sizes(group=16, latent=64, head_size=16, kv_dtype=F8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keys", [64, 512])
def test_each_kind(sizes: Sizes, keys: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys at once, and some after the others."""
    monkeypatch.setattr(by_torch, "_KEYS", keys)
    make = make_call if sizes.latent is None else make_latent_call
    call = make(MIXED, sizes, device)
    attention_by_torch(call)
    check(call)
