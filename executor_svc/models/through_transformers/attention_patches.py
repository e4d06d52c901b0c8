"""Patches for architectures of transformers that do not call `AttentionInterface`: they insert Cadenza's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from executor_svc.models.through_transformers.attention import attention

AttentionPatch = Callable[[nn.Module], None]
"""Inserts Cadenza's attention into one module of a model; does nothing to modules other than attention."""


class _ReplaceSdpa(TorchFunctionMode):
    """Replaces torch's scaled_dot_product_attention in the calls of a module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        # The module may have repeated each KV head for all of its query heads.
        repeats = max(1, key.shape[1] // self._module.num_kv_heads)
        output, _ = attention(self._module, query, key[:, ::repeats], value[:, ::repeats], None)
        return output.transpose(1, 2).contiguous()


def _falcon(module: Any) -> None:
    """Patch Falcon, which calls torch's attention directly."""
    if not hasattr(module, "query_key_value"):
        return
    forward = module.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        with _ReplaceSdpa(module):
            return forward(*args, **kwargs)

    module.forward = patched


def _gpt_j(module: Any) -> None:
    """Patch GPT-J, CodeGen and GPT-Neo, which have a method `_attn`.

    GPT-Neo's does not scale, and may have a window.
    """
    if not hasattr(module, "_attn"):
        return
    divisor = getattr(module, "scale_attn", None)
    options = {
        "scaling": 1.0 if divisor is None else 1 / float(divisor),
        "sliding_window": module.config.window_size if getattr(module, "attention_type", "") == "local" else None,
    }

    def patched(query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None = None) -> tuple[Tensor, None]:
        output, _ = attention(module, query, key, value, None, **options)
        return output.transpose(1, 2), None

    module._attn = patched


ATTENTION_PATCHES: dict[str, tuple[str, AttentionPatch]] = {
    "CodeGenForCausalLM": ("eager", _gpt_j),
    "FalconForCausalLM": ("sdpa", _falcon),
    "GPTJForCausalLM": ("eager", _gpt_j),
    "GPTNeoForCausalLM": ("eager", _gpt_j),
}
"""By class: the attention implementation to load it with, and the patch."""
