"""Batches of a few fixed shapes for training on a CPU.

oneDNN compiles a bf16 matrix product for each new shape, so free shapes cost more time than they save. Here every
sample goes to the smallest width that holds it, and a width is emitted when it has a full batch of rows; samples
that do not fill a batch wait for a later step, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Sample = tuple[list[int], list[float]]
MicroBatch = tuple[torch.Tensor, torch.Tensor]

WIDTHS = (10, 13, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 288, 512)


class Batcher:
    """Draws samples until a step is full; all shapes are (tokens // width, width) for a width of WIDTHS."""

    def __init__(self, draw: Callable[[], Sample], pad_id: int, tokens_per_micro_batch: int) -> None:
        self._draw = draw
        self._pad_id = pad_id
        self._rows = {width: tokens_per_micro_batch // width for width in WIDTHS}
        self._waiting: dict[int, list[Sample]] = {width: [] for width in WIDTHS}

    def step(self, num_samples: int) -> list[MicroBatch]:
        """Return micro-batches with `num_samples` samples or a few more: (ids, weights), both [rows, width]."""
        batches: list[MicroBatch] = []
        emitted = 0
        while emitted < num_samples:
            ids, weights = self._draw()
            width = next(width for width in WIDTHS if width >= len(ids))
            queue = self._waiting[width]
            queue.append((ids, weights))
            if len(queue) == self._rows[width]:
                batches.append(self._pad(queue, width))
                emitted += len(queue)
                queue.clear()
        return batches

    def _pad(self, samples: list[Sample], width: int) -> MicroBatch:
        ids = torch.tensor([ids + [self._pad_id] * (width - len(ids)) for ids, _ in samples])
        weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in samples])
        return ids, weights
