"""Notes the drafts of a head on the GPU's path, and what the head in float64 drafts from the same states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor_svc.gpu.drafts.drafting import Layout
from executor_svc.gpu.kernels.slots.slots import StepSizes
from tests.helpers.executor.stepping import Stepper
from tests.helpers.models.eagle3_heads import ReferenceHead


class WatchedHead:
    """Reads the target's states of each step, and the drafts before it, from the memory of the steps."""

    def __init__(self, stepper: Stepper, reference: ReferenceHead) -> None:
        executor: Any = stepper.executor
        self._executor, self._reference = executor, reference
        self.states: dict[int, dict[int, Tensor]] = {}
        """By slot and position."""
        self.proposals: list[tuple[int, list[int], list[int]]] = []
        """A slot, its drafts, and those of the reference."""
        forward, precede = executor._runner.forward, executor._passes.precede

        def watched_forward(scheduled: Any, sizes: StepSizes, *args: Any) -> Any:
            found = forward(scheduled, sizes, *args)
            self._keep(len(scheduled.slots))
            return found

        def watched_precede(layout: Layout, *args: Any) -> None:
            precede(layout, *args)
            if layout.sizes.num_drafts:
                self._compare(layout)

        executor._runner.forward, executor._passes.precede = watched_forward, watched_precede

    def _keep(self, num_seqs: int) -> None:
        buffers, states = self._executor._device_slots.buffers, self._executor._runner.states
        inputs = buffers.inputs(buffers.most)
        starts, lens = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
        for index in range(num_seqs):
            of_slot = self.states.setdefault(int(buffers.seq_slots[index]), {})
            for row in range(starts[index], starts[index + 1] if lens[index] else 0):
                of_slot[int(inputs.positions[row])] = states[row].clone()

    def _compare(self, layout: Layout) -> None:
        state = self._executor._device_slots.state
        for slot in layout.scheduled.slots.tolist():
            count, known = int(state.num_drafts[slot]), int(state.num_tokens[slot])
            if not count:
                continue
            tokens = state.token_ids[slot, : known + count].tolist()
            rows = torch.stack([self.states[slot][position] for position in range(known - 1)])
            expected, _ = self._reference.drafts(tokens[1:known], rows, count)
            self.proposals.append((slot, tokens[known:], expected))
