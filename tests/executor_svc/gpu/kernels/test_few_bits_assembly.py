"""The instructions that unpack codes, computed here: Triton's interpreter does not run them."""

from __future__ import annotations

import re
import struct

import pytest
import torch

from executor_svc.gpu.kernels.few_bits import in_place, unpacking

WORDS = [0x00000000, 0xFFFFFFFF, 0x8421F30D, 0x7E81C35A]
MORE = 0xB16D93C4


def run(asm: str, outputs: int, *inputs: int) -> list[int]:
    """Return the results $0, $1, ... of PTX with operands of 32 bits."""
    values = {f"${outputs + index}": value for index, value in enumerate(inputs)}

    def of(name: str) -> int:
        return values[name] if name in values else int(name, 0)

    for line in re.findall(r"([^;{}]+);", asm):
        name, *rest = re.split(r"[\s,]+", line.strip())
        if name == ".reg":
            continue
        to, *some = rest
        a, *others = (of(each) for each in some)
        match name:
            case "mov.b32":
                found = a
            case "and.b32":
                found = a & others[0]
            case "or.b32":
                found = a | others[0]
            case "shl.b32":
                found = a << others[0]
            case "shr.u32":
                found = a >> others[0]
            case "shr.s32":
                found = (a - (a >> 31 << 32)) >> others[0]
            case "prmt.b32":
                both = (a | others[0] << 32).to_bytes(8, "little")
                chosen = [others[1] >> 4 * place & 0xF for place in range(4)]
                assert max(chosen) < 8
                found = int.from_bytes(bytes(both[each] for each in chosen), "little")
            case _:
                raise AssertionError(name)
        values[to] = found & 0xFFFFFFFF
    return [values[f"${index}"] for index in range(outputs)]


def number(bits: int) -> float:
    (found,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(found)


def bytes_of(word: int) -> list[int]:
    return list(word.to_bytes(4, "little"))


def in_pairs(four: list[float]) -> list[float]:
    """Return numbers of bytes as results of two numbers of 16 bits stand: first bytes, then second ones."""
    return [four[0], four[2], four[1], four[3]]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("bits", "shift"), [(4, 0), (5, 0), (5, 3), (6, 0), (6, 2)])
def test_codes_of_less_than_8_bits_are_raised(bits: int, shift: int, word: int) -> None:
    in_order = {4: unpacking.FOUR_BITS, 5: unpacking.FIVE_BITS, 6: unpacking.SIX_BITS}[bits]
    swapped = {4: in_place._FOUR, 5: in_place._FIVE, 6: in_place._SIX}[bits]
    high = [byte >> shift for byte in bytes_of(MORE)] if bits > 4 else [0] * 4
    mask = (1 << (bits - 4)) - 1
    low = [128.0 + (byte & 0xF | (more & mask) << 4) for byte, more in zip(bytes_of(word), high, strict=True)]
    up = [128.0 + (byte >> 4 | (more >> 4 & mask) << 4) for byte, more in zip(bytes_of(word), high, strict=True)]
    assert [number(each) for each in run(in_order.value, 8, word, MORE, shift)] == low + up
    found = [number(each) for each in run(swapped.value, 8, word, MORE, shift)]
    assert found == in_pairs(low) + in_pairs(up)


@pytest.mark.parametrize("word", WORDS)
def test_codes_of_8_bits_are_raised(word: int) -> None:
    expected = [32768.0 + byte for byte in bytes_of(word)]
    assert [number(each) for each in run(unpacking.EIGHT_BITS.value, 4, word)] == expected
    assert [number(each) for each in run(in_place._EIGHT.value, 4, word)] == in_pairs(expected)


@pytest.mark.parametrize("word", WORDS[2:])
def test_numbers_in_e4m3_are_too_small_by_a_power_of_two(word: int) -> None:
    expected = torch.tensor(bytes_of(word), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    assert [number(each) * 2.0**120 for each in run(unpacking.E4M3.value, 4, word)] == expected
    assert [number(each) * 2.0**120 for each in run(in_place._FLOAT.value, 4, word)] == in_pairs(expected)
