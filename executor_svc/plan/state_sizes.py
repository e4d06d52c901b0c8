"""The sizes of what recurrent layers keep of a sequence: the units of its state, as `device.states` explains them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

HEADER_BYTES = 64
UNIT_MULTIPLE = 64
"""Units begin at multiples of so many bytes of a page, and have multiples of it."""
_LANES = 16
_PART_COLUMNS = 32
_FLOAT = 4


class HasItemSize(Protocol):
    """A dtype."""

    @property
    def itemsize(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ConvState:
    """A causal depthwise convolution: each channel reads its own last inputs."""

    channels: int
    width: int
    """Taps; the state is the last width - 1 inputs."""

    def ring_rows(self, tail: int) -> int:
        """Return the rows of the ring."""
        return self.width - 1 + tail

    def num_bytes(self, tail: int, dtype: HasItemSize) -> int:
        """Return the bytes of the unit."""
        return _whole(self.ring_rows(tail) * self.channels * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class HeadUnit:
    """How the unit of a head is laid out, all in fp32: its parts one after the other.

    A part has its columns of the matrix, [rows, part_columns], then the tail, [tail, tail_columns]: of each row the key
    [padded_rows], the decay [decay_columns, of which `decays` are used], and what is added [part_columns]. A row is
    folded by matrix = decay * matrix + key x added. A device may keep a matrix in a form of its own, and a number of it
    behind the decay of the tail's first row, where `decays` is 1.
    """

    rows: int
    """Numbers of a key."""
    columns: int
    """Numbers of a value."""
    decays: int
    """1: one for the head; else one for each row."""

    @property
    def padded_rows(self) -> int:
        return _lanes(self.rows)

    @property
    def decay_columns(self) -> int:
        return _lanes(self.decays)

    @property
    def part_columns(self) -> int:
        """Columns of a part: 32, or 16 where the head has no more."""
        return min(_PART_COLUMNS, _lanes(self.columns))

    @property
    def num_parts(self) -> int:
        return -(-self.columns // self.part_columns)

    @property
    def tail_columns(self) -> int:
        return self.padded_rows + self.decay_columns + self.part_columns

    def part_floats(self, tail: int) -> int:
        """Return the numbers of a part, a multiple of 16."""
        return self.rows * self.part_columns + tail * self.tail_columns

    def num_bytes(self, tail: int) -> int:
        """Return the bytes of the unit."""
        return _whole(self.num_parts * self.part_floats(tail) * _FLOAT)


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The gated delta rule (Yang et al., 2024, arXiv 2412.06464); Kimi delta attention with gate_by_key."""

    key_heads: int
    value_heads: int
    """A multiple of key_heads."""
    key_size: int
    value_size: int
    gate_by_key: bool = False
    """Whether each key index has a decay of its own (Kimi Linear, 2025, arXiv 2510.26692), or a head has one."""
    tiled: bool = False
    """Value head j has key head j % key_heads (GGUF); else j // (value_heads // key_heads)."""

    @property
    def num_heads(self) -> int:
        """Units of the recurrence."""
        return self.value_heads

    @property
    def unit(self) -> HeadUnit:
        return HeadUnit(self.key_size, self.value_size, self.key_size if self.gate_by_key else 1)

    def key_head(self, value_head: int) -> int:
        """Return the key head that a value head has."""
        if self.tiled:
            return value_head % self.key_heads
        return value_head // (self.value_heads // self.key_heads)


@dataclass(frozen=True, slots=True)
class MambaState:
    """The recurrence of Mamba-2 (Dao and Gu, 2024, arXiv 2405.21060): keys are its B, queries its C, values its x."""

    heads: int
    head_size: int
    state_size: int
    groups: int
    """Heads of a group are neighbours and share B and C."""

    @property
    def num_heads(self) -> int:
        """Units of the recurrence."""
        return self.heads

    @property
    def unit(self) -> HeadUnit:
        return HeadUnit(self.state_size, self.head_size, 1)

    def key_head(self, head: int) -> int:
        """Return the group of a head."""
        return head // (self.heads // self.groups)


Recurrence = DeltaState | MambaState


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a recurrent layer keeps of a sequence."""

    conv: ConvState
    recurrence: Recurrence | None = None

    def unit_bytes(self, tail: int, dtype: HasItemSize) -> tuple[int, ...]:
        """Return the bytes of the convolution's unit, then of each head's; multiples of UNIT_MULTIPLE."""
        conv = self.conv.num_bytes(tail, dtype)
        if self.recurrence is None:
            return (conv,)
        return (conv, *(self.recurrence.num_heads * (self.recurrence.unit.num_bytes(tail),)))


def _lanes(count: int) -> int:
    return -(-count // _LANES) * _LANES


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // UNIT_MULTIPLE) * UNIT_MULTIPLE
