"""The recurrent states of a step as the tensors that a model reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.batch.slot_states import SavedStates, SlotStates
from executor_svc.plan.arrays import IntArray


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of a step's S sequences, P pages each, and the V copies that the step makes of them."""

    tables: Tensor
    """[S, P] int32: the pages."""
    context_lens: Tensor
    """[S] int32."""
    folded: Tensor
    """[S] int32: where each state stands before the step."""
    ends: Tensor
    """[S] int32: where it stands after it."""
    save_starts: Tensor
    """[S + 1] int32: sequence s has copies save_starts[s] to save_starts[s + 1]."""
    save_positions: Tensor
    """[V] int32, ascending in each sequence."""
    save_tables: Tensor
    """[V, P] int32: the pages of the copies."""
    saved_slots: IntArray
    """[V]."""

    @property
    def saved(self) -> SavedStates:
        """The copies."""
        return SavedStates(self.saved_slots, self.save_positions.numpy())


def step_states(
    states: SlotStates, rows: IntArray, context: IntArray, counts: IntArray, folded: IntArray
) -> StepStates:
    """Return the states of a step that computes counts [S] tokens of the slots rows [S] behind context [S].

    folded: [S] where the states stand.
    """
    ends = states.ends(context, counts)
    saves, num_saves = states.due(rows, folded, ends)
    pages = np.array([save.pages for save in saves], np.int32).reshape(len(saves), states.tables.shape[1])
    return StepStates(
        tables=torch.from_numpy(states.tables[rows]),
        context_lens=torch.from_numpy(context.astype(np.int32)),
        folded=torch.from_numpy(folded.astype(np.int32)),
        ends=torch.from_numpy(ends.astype(np.int32)),
        save_starts=torch.from_numpy(np.append(0, num_saves.cumsum()).astype(np.int32)),
        save_positions=torch.from_numpy(np.array([save.position for save in saves], np.int32)),
        save_tables=torch.from_numpy(pages),
        saved_slots=np.repeat(rows, num_saves),
    )
