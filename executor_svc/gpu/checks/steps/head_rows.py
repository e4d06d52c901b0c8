"""What surrounds a draft head on the device, beside what the host computes: its rows behind a step, its vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.batch.ragged import spans
from executor_svc.gpu.checks.steps.history import CheckedStep
from executor_svc.gpu.checks.steps.words import differing, first_of
from executor_svc.gpu.choices.ways import Tolerance
from executor_svc.gpu.kernels.sampling.draft_vocabulary import spread, to_target
from executor_svc.gpu.kernels.slots.head_rows import keep_results, read_next_tokens
from executor_svc.models.heads.head import DraftHead
from executor_svc.plan.arrays import IntArray
from executor_svc.worker.head_source import head_batch

_SAME = Tolerance(0.0, 0.0)
_ROWS = 37
"""Of logits."""
_NEVER_WRITTEN = -3.0


class CheckedHeadRows:
    """A head's rows of a step."""

    def __init__(self, step: CheckedStep) -> None:
        """step: is built, and not committed yet."""
        self._step = step
        self._starts: IntArray = step.history.truth.num_computed_tokens[step.actual.slots].copy()

    def reason(self, width: int, dtype: torch.dtype) -> str | None:
        """Read the tokens behind those of the committed step, and keep results; return how they are wrong.

        width: of the head's results.
        """
        step, truth = self._step, self._step.history.truth
        sizes, rows, device = step.sizes, step.actual.slots, step.history.device
        state, buffers = step.history.slots.state, step.history.slots.buffers
        live = np.isin(step.planned.slots, rows)
        firsts = (step.counts.cumsum() - step.counts)[live]
        # As `HeadSource.committed`: rows whose next token is known.
        counts = np.clip(truth.num_tokens[rows] - 1 - self._starts, 0, step.counts[live])
        there = counts > 0
        tokens = np.zeros(sizes.num_tokens, np.int64)
        if there.any():
            batch = head_batch(truth, rows[there], self._starts[there], counts[there])
            tokens[spans(firsts, counts)[1]] = batch.token_ids
        read_next_tokens(state, buffers, sizes)
        read = differing("token_ids", step.inputs.token_ids, tokens)

        generator = torch.Generator().manual_seed(step.number)
        made = torch.randn(sizes.num_tokens, width, generator=generator).to(dtype)
        results = torch.full((state.num_slots, width), _NEVER_WRITTEN, dtype=dtype)
        expected, kept = results.clone(), there & (self._starts + counts + 1 == truth.num_tokens[rows])
        expected[rows[kept]] = made[(firsts + counts - 1)[kept]]
        results = results.to(device)
        keep_results(made.to(device), results, state, buffers, sizes)
        return first_of([read, _of("results", _SAME.reason_against(results, expected))])


def vocabulary_reason(head: DraftHead) -> str | None:
    """Give random ids and logits of a head with a smaller vocabulary its target's ids; return how they are wrong."""
    ids = head.target_ids
    assert ids is not None
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(-1, len(ids), (_ROWS,), generator=generator)
    found[:2] = torch.tensor([-1, len(ids) - 1])
    logits = torch.randn(_ROWS, len(ids), generator=generator).to(ids.device)
    wanted = torch.where(found < 0, found, head.to_target(found.clamp(min=0).to(ids.device)).cpu())
    found = found.to(ids.device)
    to_target(found, ids)
    wide = torch.full((_ROWS, head.vocab_size), float("-inf"), device=ids.device)
    spread(logits, ids, wide)
    same = _SAME.reason_against(wide, head.spread(logits))
    return first_of([differing("ids", found, wanted), _of("logits", same)])


def _of(what: str, reason: str | None) -> str | None:
    return None if reason is None else f"{what}: {reason}"
