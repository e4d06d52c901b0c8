"""transformers' model with 8-bit numbers in the same places: what `--quantization` and `--kv-cache-dtype` mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from executor_svc.gpu.kernels.quantize import FP8_MAX, quantize_fp8, quantize_int8
from executor_svc.gpu.linear import Quantization
from tests.helpers.models.golden import transformers_model


def logprobs(
    folder: Path,
    tokens: list[int],
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Return the logprobs [tokens, vocabulary] float32 after each token of a text that is computed at once.

    Args:
        folder: of the checkpoint.
        tokens: the text.
        dtype: of what is in between.
        quantization: of all linear layers but the head.
        kv_scales: [layers, 2 (K, V), KVH] of keys and values that are rounded to fp8; None: they are not.
    """
    model = transformers_model(folder, dtype)
    if quantization != "none":
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear) and name != "lm_head":
                _quantize(part, quantization)
    cache = DynamicCache() if kv_scales is None else _RoundingCache(kv_scales)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def _quantize(linear: nn.Linear, quantization: Quantization) -> None:
    weight = linear.weight.data
    narrow, scale = (quantize_int8 if quantization == "int8" else quantize_fp8)(weight)
    linear.weight.data = (narrow.float() * scale[:, None]).to(weight.dtype)
    if quantization == "fp8_w8a8":
        linear.register_forward_pre_hook(lambda _, inputs: _rounded_rows(inputs[0]))


def _rounded_rows(x: Tensor) -> Tensor:
    narrow, scale = quantize_fp8(x.flatten(0, -2))
    return (narrow.float() * scale[:, None]).view(x.shape).to(x.dtype)


class _RoundingCache(DynamicCache):
    """Keys and values that have been through fp8, each head over its scale; what is too large is cut off."""

    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self._scales = scales

    def update(self, keys: Tensor, values: Tensor, layer: int, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Take keys and values [1, KVH, T, D]; return those of all tokens."""
        k_scale, v_scale = self._scales[layer][:, :, None, None]
        return super().update(_through_fp8(keys, k_scale), _through_fp8(values, v_scale), layer, *others, **more)


def _through_fp8(x: Tensor, scale: Tensor) -> Tensor:
    stored = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (stored.float() * scale).to(x.dtype)
