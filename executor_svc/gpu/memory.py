"""Measures the peak GPU memory of a piece of work."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def peak_bytes_of(work: Callable[[], None], device: torch.device) -> int:
    """Do the work; return the peak of PyTorch's bytes during it, minus its bytes afterwards.

    Unreferenced objects of the work, garbage too, and PyTorch's cached free memory are released first.
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
