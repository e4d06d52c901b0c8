"""A look at a transformers model in action: which attention each layer asks for, and where its hidden states come out.

One small forward pass tells what no field of config.json tells for all architectures alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.models.base import ModelConfigError
from executor_svc.models.through_transformers.attention import PROBE_NAME, attending
from executor_svc.models.through_transformers.attention_patches import AttentionPatch

_NUM_TOKENS = 3

_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask")
"""Arguments that change what attention computes, and that our kernels do not have."""

_HARMLESS = ("position_ids", "cache_position")
"""Tensors that attention may be given; any other one is taken for a part of what it computes."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention that one layer asks for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """The larger one of keys' and values'."""
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one forward pass of a model has shown."""

    layers: tuple[LayerAttention, ...]
    names: tuple[str, ...]
    """Of each layer's attention, as the checkpoint's tensors have it before theirs."""
    base: nn.Module
    """The part that gives hidden states to the head: its output has `last_hidden_state`."""
    hidden_size: int
    vocab_size: int


_masks: dict[int, tuple[Tensor, int | None]] = {}
"""What stands in for the masks of the running probe, and the window of each, by the address of its numbers."""


def describe_mask(
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Stand in for transformers' mask makers while a model is looked at: remember the window."""
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=dtype, device=device)
    _masks[mask.data_ptr()] = mask, local_size
    return mask


class _Recorder:
    """Writes down what layers ask for, and gives them zeros."""

    def __init__(self) -> None:
        self.layers: list[LayerAttention] = []
        self.modules: list[nn.Module] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        self.modules.append(module)
        self.layers.append(_layer(module, query, key, value, attention_mask, options))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _layer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> LayerAttention:
    where = type(module).__name__
    unknown = [name for name in _UNSUPPORTED if options.get(name) is not None]
    unknown += [name for name, option in options.items() if isinstance(option, Tensor) and name not in _HARMLESS]
    if unknown:
        raise ModelConfigError(f"{where} asks for {unknown[0]} in attention, which Cadenza's does not have")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise ModelConfigError(f"{where} is not causal")
    heads, kv_heads = query.shape[1], key.shape[1]
    tokens = (1, _NUM_TOKENS)
    if {(x.shape[0], x.shape[2]) for x in (query, key, value)} != {tokens} or heads % kv_heads:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ModelConfigError(f"{where} gives attention queries, keys and values of shapes {shapes}")
    scaling = options.get("scaling")
    window = options.get("sliding_window")
    if mask is not None:
        if mask.data_ptr() not in _masks:
            raise ModelConfigError(f"{where} makes a mask of its own")
        # What transformers' own attention goes by; some layers name a window that their mask does not have.
        window = _masks[mask.data_ptr()][1]
    return LayerAttention(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=max(query.shape[-1], value.shape[-1]),
        scale=float(scaling) if scaling is not None else 1 / math.sqrt(query.shape[-1]),
        window=window,
        softcap=options.get("softcap"),
    )


def probe_model(model: Any, patch: AttentionPatch | None) -> ProbeResult:
    """Run a causal LM of transformers over a few tokens; raises ModelConfigError for attention that we can not do.

    The model's attention implementation is another one afterwards.
    """
    recorder = _Recorder()
    bases: list[tuple[nn.Module, Tensor]] = []

    def record_base(module: nn.Module, _: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, Tensor):
            bases.append((module, hidden))

    if patch is None:
        model.set_attn_implementation(PROBE_NAME)
    hooks = [module.register_forward_hook(record_base) for module in model.modules()]
    ids = torch.arange(_NUM_TOKENS, device=model.device)[None] + 1
    try:
        with attending(recorder), torch.inference_mode():
            mask = None if patch is None else empty_mask(model)
            output = model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        _masks.clear()
        for hook in hooks:
            hook.remove()
    if not recorder.layers or not bases:
        raise ModelConfigError("its code in transformers does not let its attention be replaced")
    # The outermost one ends last.
    base, hidden = bases[-1]
    names = {module: name for name, module in model.named_modules()}
    of_layers = tuple(names[module] for module in recorder.modules)
    return ProbeResult(_checked(recorder.layers), of_layers, base, hidden.shape[-1], output.logits.shape[-1])


def empty_mask(model: Any) -> Tensor:
    """Return what keeps a model with attention of its own from making a mask: one that is done, and not read."""
    return torch.zeros(1, 1, 1, 1, device=model.device, dtype=model.dtype)


def _checked(layers: list[LayerAttention]) -> tuple[LayerAttention, ...]:
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers}
    if len({(kv_heads, size) for _, kv_heads, size in sizes}) > 1:
        shown = ", ".join(f"{kv_heads} of size {size}" for _, kv_heads, size in sorted(sizes))
        raise ModelConfigError(f"its layers have different KV heads ({shown}); the KV cache has one shape for all")
    return tuple(layers)
