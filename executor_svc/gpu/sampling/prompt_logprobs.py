"""Logprobs of prompt tokens on the device: computed in pieces after the forward pass, reported with the step's tokens.

Computes the same as `sampling.logprobs`. Prompt logits that are not finite mark their slot, which fails when it
samples.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cadenza_common.plan.result import LogprobColumns
from executor_svc.batch.prompt_rows import PromptColumns, PromptRows, by_slot
from executor_svc.gpu.kernels.sampling.logprobs import DeviceLogprobs, RowLogprobsKernel, row_logprobs
from executor_svc.gpu.kernels.sampling.state import SamplingWorkspace
from executor_svc.gpu.sampling.sampler import most_top
from executor_svc.gpu.slots.staging import Download, Fetched, sent
from executor_svc.gpu.step_ranks import GpuStepRanks


class PendingPrompts:
    """Logprobs of prompt tokens that are being copied to the host, in pieces."""

    def __init__(self, requested: PromptRows, pieces: list[tuple[Fetched, int]], most: int) -> None:
        """pieces: each with its number of rows; most: maximum number of top tokens per row."""
        self._requested, self._pieces, self._most = requested, pieces, most

    def wait(self) -> dict[int, LogprobColumns]:
        """Wait for the copies; return one entry for each slot of `requested`."""
        found = [
            DeviceLogprobs.over(torch.from_numpy(fetched.wait()), num_rows, self._most)
            for fetched, num_rows in self._pieces
        ]
        num_top = np.repeat(self._requested.num_top, self._requested.counts)
        there = np.arange(self._most) < num_top[:, None]
        columns = PromptColumns(
            torch.cat([one.chosen for one in found]).numpy(),
            torch.cat([one.ranks for one in found]).numpy().astype(np.int64),
            torch.cat([one.top_ids for one in found]).numpy()[there].astype(np.int64),
            torch.cat([one.top for one in found]).numpy()[there],
        )
        return by_slot(self._requested, columns)


class GpuPromptLogprobs:
    """Computes logprobs of prompt tokens, in the workspace of sampling, which runs on the same stream."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        workspace: SamplingWorkspace,
        prompt_failed: Tensor,
        ranks: GpuStepRanks,
        row_logprobs: RowLogprobsKernel = row_logprobs,
    ) -> None:
        """logits: returns [R, vocab] float32 for rows [R] int64 of the step; prompt_failed: [n] int32 by slot.

        ranks: all compute logits, and one has them whole. row_logprobs: computes logprobs.
        """
        self._row_logprobs = row_logprobs
        self._logits, self._workspace, self._prompt_failed = logits, workspace, prompt_failed
        self._ranks = ranks
        self._max_rows = workspace.best.shape[0]
        self._download = Download(DeviceLogprobs.num_words(self._max_rows, most_top(1)), prompt_failed.device)

    def compute(self, requested: PromptRows) -> PendingPrompts | None:
        """Enqueue the computation of the requested logprobs, and their copy to the host; None where another rank has
        them.
        """
        most = most_top(int(requested.num_top.max()))
        owners, num_top = np.repeat(requested.slots, requested.counts), np.repeat(requested.num_top, requested.counts)
        pieces = []
        for start in range(0, len(requested.rows), self._max_rows):
            piece = slice(start, start + self._max_rows)
            if not self._ranks.samples:
                self._logits(sent(requested.rows[piece], self._prompt_failed.device))
                continue
            found = self._compute_piece(
                requested.rows[piece], requested.token_ids[piece], owners[piece], num_top[piece], most
            )
            pieces.append((self._download.fetch(found.words), len(found.chosen)))
        self._ranks.share_first(self._prompt_failed)
        return PendingPrompts(requested, pieces, most) if self._ranks.samples else None

    def _compute_piece(
        self, rows: np.ndarray, token_ids: np.ndarray, owners: np.ndarray, num_top: np.ndarray, most: int
    ) -> DeviceLogprobs:
        device = self._prompt_failed.device
        logits = self._logits(sent(rows, device))
        out, index = DeviceLogprobs.empty(len(rows), most, device), torch.arange(len(rows), device=device).int()
        tokens, num_logprobs = sent(token_ids, device), sent(num_top.astype(np.int32), device)
        self._row_logprobs(logits, index, index, tokens, num_logprobs, self._workspace, out, after_sampling=False)
        # The maximum is NaN if any logit is.
        failed = ~logits.amax(dim=1).isfinite()
        self._prompt_failed.index_add_(0, sent(owners, device), failed.int())
        return out
