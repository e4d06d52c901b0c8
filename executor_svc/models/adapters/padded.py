"""Parts of adapters for linears whose heads are widened to the size that the kernels take."""

from __future__ import annotations

from dataclasses import replace

from executor_svc.device.kernels import AttentionShape
from executor_svc.models.adapters.adapter import LoraPart
from executor_svc.models.adapters.modules import LinearName
from executor_svc.models.layers.attention import pad_heads, pad_output


def pad_part(part: LoraPart, linear: LinearName, shape: AttentionShape) -> LoraPart:
    """Return a part for linears as `layers.attention` pads them: added rows and columns are zero.

    Of attention.qkv the rows of b are widened, with the first row among padded ones; of attention.output the columns
    of a. Others are returned as they are.
    """
    size, padded = shape.head_size, shape.padded_head_size
    if size == padded:
        return part
    if linear == "attention.qkv":
        return replace(part, b=pad_heads(part.b, size, padded), first_row=part.first_row // size * padded)
    return replace(part, a=pad_output(part.a, shape)) if linear == "attention.output" else part
