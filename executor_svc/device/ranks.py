"""The operations between the ranks of one model replica: each holds some heads, some of the MLP and of the vocabulary.

Every rank runs the same operations in the same order (Shoeybi et al., 2019). Sums are taken in the order of the ranks,
so that a degree gives the same bits in every run, but not those of another degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from executor_svc.device.kernels import AttentionShape, HeadNorms
from executor_svc.device.states import GatedNormKind


@dataclass(frozen=True, slots=True)
class Share:
    """The rank that a process is, among how many."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> range:
        """Return this rank's part of `total` rows in a row: the same number for each, fewer for the last ones."""
        each = -(-total // self.size)
        return range(min(total, self.rank * each), min(total, (self.rank + 1) * each))


WHOLE = Share()
"""Of a model that is not divided."""


class RankError(RuntimeError):
    """A rank failed within a step; the message names it."""


class RankKernels(Protocol):
    """The operations between ranks, of one rank; recorded like all others."""

    share: Share

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a rank's partial results, of a model of this dtype."""
        ...

    def sum_partials(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype, name: str = "sum") -> Tensor:
        """Return the sum of all ranks' x [T, hidden], of `partial_dtype`, plus bias [hidden], on each rank.

        It is computed in float32, and rounded once to dtype. name: of its memory, which the next of that name
        overwrites.
        """
        ...

    def embed(self, table: RankEmbedding, first: int, count: int, token_ids: Tensor, scale: float) -> Tensor:
        """Return the tokens' rows [T, hidden] on every rank; table: of this rank, for tokens first to first + count."""
        ...

    def gather_columns(self, x: Tensor, first: int, columns: int) -> Tensor:
        """Return [R, columns] float32 on rank 0, of the ranks' x [R, n] side by side; first: the first column of x.

        Other ranks get memory of this shape, without a meaning.
        """
        ...

    def check(self) -> None:
        """Raise RankError if a rank has failed during the last operations: their results mean nothing."""
        ...

    def fail(self) -> None:
        """Let every rank leave the operations in which it waits for others, as this one has failed."""
        ...

    def reset(self) -> None:
        """Begin anew, while no rank is in an operation: rank 0 first, then the others."""
        ...


@runtime_checkable
class HeadNormRanks(RankKernels, Protocol):
    """Ranks that normalize all heads together, of which each has some."""

    def norm_all_heads(self, qkv: Tensor, norms: HeadNorms, shape: AttentionShape) -> Tensor:
        """Normalize the query heads of all ranks together, and the key heads, in place; return qkv of this rank."""
        ...


@runtime_checkable
class GatedNormRanks(RankKernels, Protocol):
    """Ranks that have parts of the groups of a gated norm."""

    def norm_groups(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, kind: GatedNormKind
    ) -> Tensor:
        """As `device.states.StateOperations.gated_norm`, of a group of which this rank has the columns x [T, width].

        The first columns of gate are theirs; weight: [width]. groups: of all ranks, fewer than ranks, neighbours of
        which share one.
        """
        ...


class RankEmbedding(Protocol):
    """As `device.kernels.Embedding`."""

    def __call__(self, token_ids: Tensor, scale: float) -> Tensor: ...
