"""Decodes that a start computes in several ways, to compare and to measure these on the GPU at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from executor_svc.gpu.graphs import CudaGraphs
from executor_svc.gpu.kernels.skinny.tiles import ROWS
from executor_svc.gpu.kernels.slots.slots import StepInputs, StepSizes
from executor_svc.gpu.skinny.recording import PROBED, Either, EitherKernels

_CONTEXT = 1024
"""Tokens of the sequences, if there is room for so many."""
_REPLAYS = 9

Replay = Callable[[], None]
Measure = Callable[[Replay], tuple[Replay, float]]
"""Runs what is enqueued by a call; returns what repeats it, as steps do, and the seconds of that."""


@dataclass(frozen=True, slots=True)
class ProbedDecodes:
    """Decodes of a recorded model. To be run before any block holds KV: they write to them."""

    hidden: Tensor
    """[max_tokens, hidden]: where the model's steps leave hidden states."""
    inputs_of: Callable[[int], StepInputs]
    """Returns the tensors of a decode of so many sequences."""
    run: Callable[[int], None]
    """Enqueues keys, values and hidden states of a decode of so many sequences, from these tensors."""
    kv_layers: Sequence[Tensor]
    """The cache of each layer."""
    max_num_seqs: int
    max_model_len: int

    def choices(self, kernels: EitherKernels) -> list[Either]:
        """Return the choices of this model."""
        return [each for each in kernels.choices if each.result.data_ptr() == self.hidden.data_ptr()]

    def each(self) -> Iterator[tuple[int, Replay]]:
        """Yield each number of sequences that is probed, and what enqueues their decode; `clear` comes after."""
        for rows in self._sizes():
            if self.fill(rows):
                yield rows, partial(self.run, rows)

    def clear(self) -> None:
        """Let no decode of these numbers of sequences write keys and values any more, until it is filled again."""
        for rows in self._sizes():
            self.inputs_of(rows).slot_mapping.fill_(-1)

    def _sizes(self) -> list[int]:
        return [size for size in PROBED if size <= min(ROWS, self.max_num_seqs)]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.kv_layers[0].shape[3])

    def length_of(self, rows: int) -> int:
        """Return the tokens of each sequence of a decode of so many; 0 if there are too few blocks."""
        return min(self._blocks_of(rows) * self.block_size, self.max_model_len)

    def _blocks_of(self, rows: int) -> int:
        """Return the blocks of each block table."""
        tables = self._tables_of(rows)
        return min(len(self.kv_layers[0]) // (rows * tables.shape[1]), tables.shape[2], -(-_CONTEXT // self.block_size))

    def _tables_of(self, rows: int) -> Tensor:
        """Return [rows, tables, max blocks]: the block tables of a decode."""
        found = self.inputs_of(rows).block_tables
        return found.view(rows, -1, found.shape[-1])

    def new_keys(self, rows: int) -> list[Tensor]:
        """Return [rows, columns] of each layer: keys and values of the tokens that a decode computes, by all tables."""
        slots = self.inputs_of(rows).slot_mapping
        at = slots.view(-1, slots.shape[-1])[:, :rows].t()
        blocks, places = at // self.block_size, at % self.block_size
        return [layer[blocks, :, :, places].reshape(rows, -1) for layer in self.kv_layers]

    def fill(self, rows: int, variant: int = 0) -> bool:
        """Set a decode of sequences with random keys and values in blocks of their own; False if there are too few.

        variant: from 0; each has other tokens, keys and values.
        """
        inputs, block_size, tables = self.inputs_of(rows), self.block_size, self._tables_of(rows)
        each, length = self._blocks_of(rows), self.length_of(rows)
        if length < 1:
            return False
        generator = torch.Generator(self.kv_layers[0].device).manual_seed(rows + ROWS * variant)
        for layer in self.kv_layers:
            layer[: rows * tables.shape[1] * each].normal_(generator=generator)
        blocks = torch.arange(rows * tables.shape[1] * each, dtype=torch.int32, device=tables.device)
        tables[:, :, :each] = blocks.view(rows, tables.shape[1], each)
        last = tables[:, :, (length - 1) // block_size].long() * block_size + (length - 1) % block_size
        inputs.slot_mapping.view(-1, inputs.slot_mapping.shape[-1])[:, :rows] = last.t()
        inputs.token_ids.copy_(torch.arange(rows) + variant)
        inputs.positions.fill_(length - 1)
        inputs.rope_lens.fill_(length)
        inputs.query_start_loc.copy_(torch.arange(rows + 1))
        inputs.seq_lens.fill_(length)
        return True


def by_graph(run: Replay) -> tuple[Replay, float]:
    """Capture what is enqueued; return its replay, and the median seconds of some of them."""
    sizes = StepSizes.decode(1)
    graphs, times = CudaGraphs([sizes], lambda _: run()), []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs.replay(sizes)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return partial(graphs.replay, sizes), float(statistics.median(times))


def use(choices: Sequence[Either], sizes: Sequence[int]) -> None:
    """Let fused layers compute decodes of these sizes alone."""
    for choice in choices:
        choice.sizes = tuple(sizes)
