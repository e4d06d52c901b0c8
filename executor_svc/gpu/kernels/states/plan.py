"""The GPU's plan of a step's recurrent states: filled once per step, shared by all recurrent layers."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from executor_svc.device.states import StateMemory
from executor_svc.gpu.kernels.slots.slots import SlotState, StepBuffers
from executor_svc.gpu.kernels.states.saves import SaveTensors
from executor_svc.gpu.kernels.states.step import LINE_BYTES, StepTensors, begin_states, end_states

_names = itertools.count()


class GpuStatePlan:
    """Implements `device.states.StatePlan`: the tensors have fixed addresses for recorded launches and captured graphs.

    `fill` gives everything, and the caller writes headers; or steps are built on the device (`read_from`), between
    `begin` and `end`, which read and write the headers.
    """

    def __init__(self, pages_per_state: int, tail: int, max_tokens: int, max_seqs: int, device: torch.device) -> None:
        """Allocate memory for steps of at most these sizes."""
        self.name = f"states{next(_names)}"
        self.num_tiles = 0
        self.tail = tail
        self._pages = pages_per_state
        self._state: SlotState | None = None

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.step = StepTensors(
            starts=zeros(max_seqs + 1),
            lens=zeros(max_seqs),
            slots=torch.arange(max_seqs, dtype=torch.int32, device=device),
            folded=zeros(max_seqs),
            owners=zeros(max_tokens),
            tables=zeros(max_seqs, pages_per_state),
            save_starts=zeros(max_seqs + 1),
            save_positions=zeros(1),
            save_tables=zeros(1, pages_per_state),
        )

    def fill(
        self,
        query_start_loc: Tensor,
        context_lens: Tensor,
        folded: Tensor,
        state_tables: Tensor,
        save_starts: Tensor,
        save_positions: Tensor,
        save_tables: Tensor,
    ) -> None:
        """As in `StatePlan`, from tensors on the host. Raises ValueError for tables of another width."""
        if state_tables.shape[1] != self._pages or save_tables.shape[1] != self._pages:
            raise ValueError(f"state_tables and save_tables must have {self._pages} columns")
        rows = query_start_loc[1:] - query_start_loc[:-1]
        self.num_tiles = len(rows)
        step = self.step
        if len(save_positions) > len(step.save_positions):
            step.save_positions = torch.empty_like(save_positions, device=step.starts.device)
            step.save_tables = torch.empty_like(save_tables, device=step.starts.device)
        for into, given in (
            (step.starts, query_start_loc),
            (step.lens, torch.where(rows > 0, context_lens + rows, 0)),
            (step.folded, folded),
            (step.owners, torch.arange(len(rows), dtype=torch.int32).repeat_interleave(rows)),
            (step.tables, state_tables),
            (step.save_starts, save_starts),
            (step.save_positions, save_positions),
            (step.save_tables, save_tables),
        ):
            into[: len(given)].copy_(given)

    def read_from(self, buffers: StepBuffers, state: SlotState, tables: Tensor, saves: SaveTensors) -> None:
        """Read steps from tensors built on the device, in place of `fill`; must precede any recording.

        Args:
            buffers, state: of the slots.
            tables: [slots, P] int32, the pages of each slot's state.
            saves: of the step.
        """
        inputs, step = buffers.inputs(buffers.most), self.step
        self._state = state
        step.starts, step.lens, step.slots = inputs.query_start_loc, inputs.seq_lens, buffers.seq_slots
        step.tables, step.save_starts = tables, saves.starts
        step.save_positions, step.save_tables = saves.positions, saves.tables

    def begin(self, num_seqs: int, num_tokens: int, pool: Tensor) -> None:
        """Enqueue the reading of headers, for a step of these padded sizes that was built on the device."""
        assert self._state is not None
        self.num_tiles = num_seqs
        begin_states(self.step, num_seqs, num_tokens, self.tail, pool, self._state.numbers)

    def end(self, pool: Tensor) -> None:
        """Enqueue the writing of headers, when all layers are enqueued."""
        end_states(self.step, self.num_tiles, self.tail, pool)


def unit_lines(memory: StateMemory) -> Tensor:
    """Return where the units of a layer lie, [units, 2] int32 on the device: page of a state, and line of the page."""
    places = [[page, offset // LINE_BYTES] for page, offset in zip(memory.pages, memory.offsets, strict=True)]
    return torch.tensor(places, dtype=torch.int32, device=memory.pool.device)
