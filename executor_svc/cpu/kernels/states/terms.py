"""Numbers of a row that all items of the recurrence read, in fp32, made once for all rows of a step.

Sizes: K heads of keys (a head of its own for each head where it has its own decays), H heads, RP rows of a matrix
padded to whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from executor_svc.cpu.kernels.codegen.emit import LANES, Int, Vec
from executor_svc.plan.state_sizes import DeltaState, HeadUnit, MambaState, Recurrence

SCALARS = 4
"""Numbers of a row and a head, of which the last has no meaning."""
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class TermLayout:
    """Where they are: vectors [K, rows, number of vectors, RP], and scalars [padded heads, rows, SCALARS].

    An item reads those of its head, one row after the other. Vectors are the key and the query; with a decay for each
    key index the key, the decays, the key times these, and the query times these. Scalars are decays, beta (of Mamba
    its step), and the products of keys and queries.
    """

    shape: Recurrence
    unit: HeadUnit
    key_heads: int

    @staticmethod
    def of(shape: Recurrence) -> TermLayout:
        if isinstance(shape, MambaState):
            return TermLayout(shape, shape.unit, shape.groups)
        return TermLayout(shape, shape.unit, shape.value_heads if shape.gate_by_key else shape.key_heads)

    @property
    def by_key(self) -> bool:
        return self.unit.decays > 1

    @property
    def is_delta(self) -> bool:
        return isinstance(self.shape, DeltaState)

    @property
    def num_vectors(self) -> int:
        return 4 if self.by_key else 2

    @property
    def heads(self) -> int:
        """Padded to whole vectors."""
        return -(-self.shape.num_heads // LANES) * LANES

    @property
    def row_vectors(self) -> int:
        """Numbers of the vectors of a row and a head of keys."""
        return self.num_vectors * self.unit.padded_rows

    @property
    def vector_bytes(self) -> int:
        """From a row's vectors to those of the next."""
        return self.row_vectors * _FLOAT

    @property
    def scalar_bytes(self) -> int:
        """From a row's scalars to those of the next."""
        return SCALARS * _FLOAT

    @property
    def decay_offset(self) -> int:
        """Bytes from a head's vectors to its decays."""
        assert self.by_key
        return self.unit.padded_rows * _FLOAT

    @property
    def sum_offsets(self) -> tuple[int, ...]:
        """Bytes from a head's vectors to those that a pass multiplies with the matrix: the key's, the query's."""
        last = (self.num_vectors - 1) * self.unit.padded_rows * _FLOAT
        key = 2 * self.decay_offset if self.by_key else 0
        return (key, last) if self.is_delta else (last,)

    def scatter(self, numbers: Vec, place: Int, first: int, height: Int) -> None:
        """Emit a write of numbers of heads from `first` on; place: that of head 0. height: rows of each head."""
        emit = numbers.emit
        for lane in range(LANES):
            at = place + height * ((first + lane) * self.scalar_bytes)
            emit.store(numbers.lane(lane), at, "float32", 1)

    def key_head(self, head: Int) -> Int:
        """Return whose vectors a head has."""
        shape, key_head = self.shape, head
        if isinstance(shape, MambaState):
            key_head = head // (shape.heads // shape.groups)
        elif not self.by_key:
            key_head = head % shape.key_heads if shape.tiled else head // (shape.value_heads // shape.key_heads)
        return key_head

    def __str__(self) -> str:
        """What kernels depend on."""
        if isinstance(self.shape, MambaState):
            return "mamba_{}_{}_{}_{}".format(*self._sizes(self.shape))
        kind = f"delta{'_tiled' if self.shape.tiled else ''}{'_by_key' if self.by_key else ''}"
        shape = self.shape
        return f"{kind}_{shape.key_heads}_{shape.value_heads}_{shape.key_size}_{shape.value_size}"

    @staticmethod
    def _sizes(shape: MambaState) -> tuple[int, int, int, int]:
        return shape.heads, shape.head_size, shape.state_size, shape.groups
