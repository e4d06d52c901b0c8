"""The saves of a step among the words of the slots' state: they change rarely, with a plan's other changes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from executor_svc.gpu.kernels.slots.slots import padded


@dataclass(frozen=True, slots=True)
class SaveTensors:
    """Of S sequences at most, with V saves of P pages; views of `words`."""

    words: Tensor
    """[num_words(S, V, P)] int32, contiguous."""
    starts: Tensor
    """[S + 1]: where each sequence's saves begin; zeros: there are none."""
    positions: Tensor
    """[V], ascending in each sequence."""
    tables: Tensor
    """[V, P]: the pages of each."""

    @staticmethod
    def num_words(max_seqs: int, max_saves: int, pages_per_state: int) -> int:
        """Return the number of words."""
        return padded(max_seqs + 1) + padded(max_saves) + padded(max_saves * pages_per_state)

    @classmethod
    def of(cls, words: Tensor, max_seqs: int, max_saves: int, pages_per_state: int) -> SaveTensors:
        """Return the views of words that are zeros."""
        sizes = [padded(max_seqs + 1), padded(max_saves), padded(max_saves * pages_per_state)]
        starts, positions, tables = words.split(sizes)
        shape = max_saves, pages_per_state
        return cls(
            words, starts[: max_seqs + 1], positions[:max_saves], tables[: max_saves * pages_per_state].view(shape)
        )
