"""What takes the place of kernels of sampling and of copies that a start has found wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepWays:
    """By which ways steps do what surrounds the model; by kernels unless said otherwise."""

    draws_on_host: bool = False
    """Whether the host chooses each token that is drawn, or whose logits are edited, as it does for beams."""
    logprobs_by_torch: bool = False
    """Whether PyTorch computes logprobs, on the device."""
    drafts_on_host: bool = False
    """Whether the host makes the drafts from what a text repeats."""
    copies_by_torch: bool = False
    """Whether PyTorch copies pages, on the device."""
