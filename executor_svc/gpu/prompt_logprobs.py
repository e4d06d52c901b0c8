"""Logprobs of prompt tokens on the device: computed piece by piece after the forward pass, told with the step's tokens.

The meaning is that of `prompt_logprobs`. A prompt whose logits are not finite marks its slot, which fails when it
samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.prompt_rows import PromptColumns, PromptRows, by_slot
from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, row_logprobs
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.gpu.sampling import most_top
from executor_svc.gpu.staging import Download, Fetched, sent
from executor_svc.plan.plan import SlotLogprobs


class PendingPrompts:
    """Logprobs of prompt tokens on their way to the host: of pieces of at most so many rows."""

    def __init__(self, wanted: PromptRows, pieces: list[tuple[Fetched, int]], most: int) -> None:
        """pieces: each with its number of rows; most: best tokens that there is room for beside each."""
        self._wanted, self._pieces, self._most = wanted, pieces, most

    def wait(self) -> tuple[SlotLogprobs, ...]:
        """Wait for them; one entry for each slot that asked."""
        found = [
            DeviceLogprobs.over(torch.from_numpy(fetched.wait()), num_rows, self._most)
            for fetched, num_rows in self._pieces
        ]
        num_top = np.repeat(self._wanted.num_top, self._wanted.counts)
        there = np.arange(self._most) < num_top[:, None]
        columns = PromptColumns(
            torch.cat([one.chosen for one in found]).numpy(),
            torch.cat([one.ranks for one in found]).numpy().astype(np.int64),
            torch.cat([one.top_ids for one in found]).numpy()[there].astype(np.int64),
            torch.cat([one.top for one in found]).numpy()[there],
        )
        return by_slot(self._wanted, columns)


class GpuPromptLogprobs:
    """Tells logprobs of prompts, in a workspace that sampling has too: both on one stream."""

    def __init__(self, logits: Callable[[Tensor], Tensor], workspace: SamplingWorkspace, prompt_failed: Tensor) -> None:
        """logits: gives those [R, vocab] float32 of rows [R] int64 of the step; prompt_failed: [n] int32 by slot."""
        self._logits, self._workspace, self._prompt_failed = logits, workspace, prompt_failed
        self._most_rows = workspace.best.shape[0]
        self._download = Download(DeviceLogprobs.num_words(self._most_rows, most_top(1)), prompt_failed.device)

    def compute(self, wanted: PromptRows) -> PendingPrompts:
        """Enqueue all that the step's rows ask for."""
        most = most_top(int(wanted.num_top.max()))
        owners, num_top = np.repeat(wanted.slots, wanted.counts), np.repeat(wanted.num_top, wanted.counts)
        pieces = []
        for start in range(0, len(wanted.rows), self._most_rows):
            piece = slice(start, start + self._most_rows)
            found = self._compute_piece(
                wanted.rows[piece], wanted.token_ids[piece], owners[piece], num_top[piece], most
            )
            pieces.append((self._download.fetch(found.words), len(found.chosen)))
        return PendingPrompts(wanted, pieces, most)

    def _compute_piece(
        self, rows: np.ndarray, token_ids: np.ndarray, owners: np.ndarray, num_top: np.ndarray, most: int
    ) -> DeviceLogprobs:
        device = self._prompt_failed.device
        logits = self._logits(sent(rows, device))
        out, index = DeviceLogprobs.empty(len(rows), most, device), torch.arange(len(rows), device=device).int()
        wanted = sent(num_top.astype(np.int32), device)
        row_logprobs(logits, index, index, sent(token_ids, device), wanted, self._workspace, out, after_sampling=False)
        # The largest is NaN if any is.
        failed = ~logits.amax(dim=1).isfinite()
        self._prompt_failed.index_add_(0, sent(owners, device), failed.int())
        return out
