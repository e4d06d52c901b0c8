"""Probes a transformers model: finds the attention of each layer, and the module that returns the hidden states.

One small forward pass shows what no field of config.json specifies for all architectures alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor_svc.models.base import ModelConfigError
from executor_svc.models.through_transformers.attention import PROBE_NAME, SINKS, attending
from executor_svc.models.through_transformers.attention_patches import AttentionPatch

_NUM_TOKENS = 3

_UNSUPPORTED = ("sinks", "position_bias", "head_mask")
"""Arguments that change the result of attention, and that Cadenza's kernels do not have."""

_KNOWN = (SINKS, "position_ids", "cache_position")
"""Tensor arguments that Cadenza's attention has, or that have no effect; any other is assumed to have one."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    """The larger of the head sizes of keys and values."""
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The findings of one forward pass of a model."""

    layers: tuple[LayerAttention, ...]
    names: tuple[str, ...]
    """Name of each layer's attention: the prefix of its tensors' names in the checkpoint."""
    base: nn.Module
    """The module that computes the head's hidden states: its output has `last_hidden_state`."""
    hidden_size: int
    vocab_size: int


_masks: dict[int, tuple[Tensor, int | None]] = {}
"""Placeholders for the masks of the running probe, with the window of each, by the address of its data."""


def describe_mask(
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Replace transformers' mask functions during a probe: return a placeholder and record its window."""
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=dtype, device=device)
    _masks[mask.data_ptr()] = mask, local_size
    return mask


class _Recorder:
    """Records the attention of layers, and returns zeros to them."""

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
    unknown += [name for name, option in options.items() if isinstance(option, Tensor) and name not in _KNOWN]
    if unknown:
        raise ModelConfigError(f"{where} needs {unknown[0]} in attention, which Cadenza's does not have")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise ModelConfigError(f"{where} is not causal")
    heads, kv_heads = query.shape[1], key.shape[1]
    sinks = options.get(SINKS)
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ModelConfigError(f"{where} has sinks of shape {list(sinks.shape)}, not one for each of {heads} heads")
    tokens = (1, _NUM_TOKENS)
    if {(x.shape[0], x.shape[2]) for x in (query, key, value)} != {tokens} or heads % kv_heads:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ModelConfigError(f"{where} calls attention with queries, keys and values of shapes {shapes}")
    scaling = options.get("scaling")
    window = options.get("sliding_window")
    if mask is not None:
        if mask.data_ptr() not in _masks:
            raise ModelConfigError(f"{where} makes a mask of its own")
        # The mask decides in transformers' own attention; some layers pass a window that their mask does not have.
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
    """Run a causal LM of transformers over a few tokens; raises ModelConfigError for unsupported attention.

    Changes the model's attention implementation.
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
    # The outermost module ends last.
    base, hidden = bases[-1]
    names = {module: name for name, module in model.named_modules()}
    of_layers = tuple(names[module] for module in recorder.modules)
    return ProbeResult(_checked(recorder.layers), of_layers, base, hidden.shape[-1], output.logits.shape[-1])


def empty_mask(model: Any) -> Tensor:
    """Return a finished mask, which is not read: it keeps a model with attention of its own from making one."""
    return torch.zeros(1, 1, 1, 1, device=model.device, dtype=model.dtype)


def _checked(layers: list[LayerAttention]) -> tuple[LayerAttention, ...]:
    sizes = {(layer.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers}
    if len({(kv_heads, size) for _, kv_heads, size in sizes}) > 1:
        shown = ", ".join(f"{kv_heads} of size {size}" for _, kv_heads, size in sorted(sizes))
        raise ModelConfigError(f"its layers have different KV heads ({shown}); the KV cache has one shape for all")
    return tuple(layers)
