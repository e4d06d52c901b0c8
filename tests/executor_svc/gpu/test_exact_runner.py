"""A whole model on the GPU's kernels in exact mode: its logits and tokens, to the bit, however they are batched."""

from __future__ import annotations
