"""An adapter in memory: what it adds to each linear as Cadenza runs it, and to the table of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from executor_svc.models.adapters.config import AdapterConfig
from executor_svc.models.adapters.modules import LinearName


@dataclass(frozen=True, slots=True)
class LoraPart:
    """Two matrices that add scale * (x @ a.T @ b.T) to some rows of a linear's output.

    peft's order: the scale multiplies the second product. They are on the CPU, in the dtype that they are stored in:
    float32, bfloat16 or float16.
    """

    module: str
    """As in `Module.name`."""
    a: Tensor
    """[r, in_features]"""
    b: Tensor
    """[rows, r]"""
    scale: float
    first_row: int
    """Its rows begin at this row of the linear, as Cadenza runs it, with heads not padded."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class EmbeddingPart:
    """Two matrices that add scale * (a[token] @ b.T) to a token's row, before the model scales its embeddings."""

    a: Tensor
    """[vocabulary, r]: the transpose of lora_embedding_A."""
    b: Tensor
    """[hidden, r]"""
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows that stand in place of the base's, in the table of embeddings or in the head's weight.

    What a LoRA pair of the same module adds comes on top of them.
    """

    token_ids: Tensor
    """[n] int64, ascending."""
    rows: Tensor
    """[n, hidden]"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """All that an adapter changes."""

    config: AdapterConfig
    linears: Mapping[tuple[int | None, LinearName], tuple[LoraPart, ...]]
    """By layer (None for lm_head) and linear: parts with disjoint rows, in their order. Absent: it stays the base's."""
    embedding: EmbeddingPart | None
    embedding_rows: TokenRows | None
    head_rows: TokenRows | None
    """Of a tied model these may be other rows than the embedding's: peft then runs two tables."""
    content_hash: bytes
    """32 bytes over all that is computed, see `digest`: neither names nor folders, nor how values are stored."""

    @property
    def max_rank(self) -> int:
        """The largest rank, 0 without LoRA pairs."""
        ranks = [part.rank for parts in self.linears.values() for part in parts]
        return max([*ranks, 0 if self.embedding is None else self.embedding.rank], default=0)

    @property
    def num_bytes(self) -> int:
        """Of all its tensors."""
        pairs = [part for parts in self.linears.values() for part in parts]
        held = sum(part.a.nbytes + part.b.nbytes for part in pairs)
        if self.embedding is not None:
            held += self.embedding.a.nbytes + self.embedding.b.nbytes
        # A tied model's two tables may share their rows.
        tables = {id(rows.rows): rows for rows in (self.embedding_rows, self.head_rows) if rows is not None}
        return held + sum(each.rows.nbytes + each.token_ids.nbytes for each in tables.values())
