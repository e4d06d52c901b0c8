"""The layout of weights in few bits: panels of 32 rows of the weight, one stream of bytes each.

A panel is a row of blocks; a block has as many columns as share its head, and consists of the head and of steps of 32
columns. Everything is stored for the panel's 32 rows side by side (lane n: row n of the panel):

- head: the numbers that the block's columns share. With super groups: super scales [32], super minimums [32]. Else, for
  groups of 32 columns or more: scales [32], minimums or zero points [32].
- step: the numbers of each of its one or two groups, where the head does not have them: sub scales (or scales) [32],
  sub minimums (or minimums) or zero points [32], planes one after the other, groups [2][32] within a plane of groups of
  16. Then the plane of high bits of codes of 5 and 6 bits, then the codes.

Codes are in words of 32 bits, [words][32]:

- 8 bits: word w has columns 4w to 4w + 3 of the step, the first in the lowest byte.
- 4 low bits: word w has columns 8w to 8w + 7 as nibbles p0 (lowest) to p7: columns 0, 2, 4, 6, 1, 3, 5, 7 of the eight.
  So (word >> 4i) & 0x000f000f is the pair of columns 2i and 2i + 1 as 16-bit numbers, and (word >> 4h) & 0x0f0f0f0f are
  four bytes: columns 0, 4, 1, 5 for h = 0, and 2, 6, 3, 7 for h = 1.
- 2 low bits, of codes of 2 and 3 bits: word w has columns 16w to 16w + 15. (word >> 2h) & 0x03030303 are four bytes:
  columns 4h, 4h + 2, 4h + 1, 4h + 3. So ((word >> 2h) >> 8b) & 0x00030003 is the pair of columns 4h + 2b, 4h + 2b + 1.
- high bits, one word (3 and 5 bits) or two (6 bits) per step and row: those of part h of byte b of word w of the low
  bits are at bit 8 * b + width * (parts * (w % words) + h), where width is 1 or 2 bits, parts is 4 (3 bits) or 2 and
  words is 2 (3 and 6 bits) or 4, of high word w // words. So four bytes of high bits are one shift and one mask away
  from each word's four bytes (`high_shift`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from executor_svc.cpu.kernels.panel_layout import PANEL
from executor_svc.device.stored_linear import QuantFormat

STEP = 32
"""Columns of a step."""
WORD_BYTES = 4
WORD_PLANE_BYTES = PANEL * WORD_BYTES
"""Of a word for each row of a panel."""

PlaneName = Literal["super_scales", "super_minimums", "scales", "minimums", "zero_points"]
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "e8m0": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """Numbers of groups, in the head or in each step."""

    in_head: bool
    offset: int
    """In bytes, from the start of the head or the step."""
    item_bytes: int
    groups: int
    """Groups of a step that have a number each, 1 or 2; 1 in a head."""

    @property
    def num_bytes(self) -> int:
        return PANEL * self.item_bytes * self.groups


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Sizes and places of a packed weight of one format with so many columns."""

    kind: QuantFormat
    columns: int

    @property
    def whole_row(self) -> bool:
        """Whether a row has one scale."""
        return self.kind.group == self.columns

    @property
    def steps(self) -> int:
        """Of a row; the last may have fewer than 32 columns, then codes of 0 follow."""
        return -(-self.columns // STEP)

    @property
    def steps_per_block(self) -> int:
        shared = self.kind.super_group or self.kind.group
        return -(-shared // STEP)

    @property
    def num_blocks(self) -> int:
        return -(-self.steps // self.steps_per_block)

    @property
    def groups_per_step(self) -> int:
        return 2 if self.kind.group < STEP and not self.whole_row else 1

    @property
    def planes(self) -> dict[PlaneName, Plane]:
        """The planes of numbers of groups, by the names of `QuantBlock`'s fields."""
        item, planes = _ITEM_BYTES[self.kind.scale], dict[PlaneName, Plane]()
        supers = self.kind.super_group is not None
        sizes = {True: 0, False: 0}

        def add(name: PlaneName, in_head: bool, item_bytes: int) -> None:
            groups = 1 if in_head else self.groups_per_step
            planes[name] = Plane(in_head, sizes[in_head], item_bytes, groups)
            sizes[in_head] += planes[name].num_bytes

        minimums = self.kind.offsets == "minimum"
        if supers:
            add("super_scales", True, item)
            if minimums:
                add("super_minimums", True, item)
        in_head = not supers and (self.kind.group >= STEP or self.whole_row)
        add("scales", in_head, 1 if supers else item)
        if minimums:
            add("minimums", in_head, 1 if supers else item)
        if self.kind.offsets == "zero_point":
            add("zero_points", in_head, 1)
        return planes

    @property
    def head_bytes(self) -> int:
        return sum(plane.num_bytes for plane in self.planes.values() if plane.in_head)

    @property
    def high_offset(self) -> int:
        """Of the plane of high bits, in bytes from the start of a step."""
        return sum(plane.num_bytes for plane in self.planes.values() if not plane.in_head)

    @property
    def high_words(self) -> int:
        """Words of high bits of a row in a step."""
        return {2: 0, 3: 1, 4: 0, 5: 1, 6: 2, 8: 0}[self.kind.bits]

    @property
    def low_offset(self) -> int:
        """Of the codes, or their four low bits, in bytes from the start of a step."""
        return self.high_offset + self.high_words * WORD_PLANE_BYTES

    @property
    def low_bits(self) -> int:
        """Bits of a code, without its high bits."""
        return 8 if self.kind.bits == 8 else 4 if self.kind.bits >= 4 else 2

    @property
    def low_words(self) -> int:
        """Words of codes of a row in a step, without their high bits: 32 codes of `low_bits` have as many."""
        return self.low_bits

    @property
    def step_bytes(self) -> int:
        return self.low_offset + self.low_words * WORD_PLANE_BYTES

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.steps_per_block * self.step_bytes

    @property
    def panel_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def high_shift(self, word: int) -> tuple[int, int]:
        """Return the high word with the high bits of a word of low bits, and the shift to the right by which those of
        the first part of each byte are above its low bits; negative: to the left.

        Those of the next part are one width of bits further.
        """
        width = self.kind.bits - self.low_bits
        words = self.low_words // self.high_words
        return word // words, width * (8 // self.low_bits) * (word % words) - self.low_bits

    def place_of(self, column: int) -> tuple[int, int, int]:
        """Return the word with a column's code, or its low bits; their byte; the part of that byte.

        Of an odd column the byte is two further than that of the even one before it; all else is equal.
        """
        word, place = divmod(column, 32 // self.low_bits)
        if self.low_bits == 8:
            return word, place, 0
        if self.low_bits == 4:
            return word, *divmod(place // 2 + 4 * (place % 2), 2)
        return word, (0, 2, 1, 3)[place % 4], place // 4


def is_supported(kind: QuantFormat, columns: int) -> bool:
    """Return whether this layout, and the kernels on it, have the format."""
    group, supers = kind.group, kind.super_group
    if columns % group or (group != 16 and group % STEP and group != columns):
        return False
    if supers is not None and (supers % STEP or columns % supers or group > STEP or kind.offsets == "zero_point"):
        return False
    if kind.scale == "e8m0" and (supers is not None or kind.offsets == "minimum"):
        return False
    if kind.values != "integer":
        return kind.offsets == "none" and kind.bits == (8 if kind.values == "e4m3" else 4)
    return kind.bits in (4, 8) or kind.offsets != "zero_point"
