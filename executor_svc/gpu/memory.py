"""What work takes of a GPU's memory while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def peak_bytes_of(work: Callable[[], None], device: torch.device) -> int:
    """Do the work; return the most bytes that PyTorch held for it at once, above what it holds afterwards.

    What the work has made and nobody keeps, garbage too, is gone then, and PyTorch keeps no memory that is free.
    """
    _free_unused(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    most = torch.cuda.max_memory_reserved(device)
    _free_unused(device)
    return int(most - torch.cuda.memory_reserved(device))


def _free_unused(device: torch.device) -> None:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
