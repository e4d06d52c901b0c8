"""Headers of GGUF files: what they hold, files in parts, and broken or hostile ones, which are refused by name."""

from __future__ import annotations

import os
import random
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza_common.gguf.file import TENSOR_TYPES, GgufError, find_gguf, read_gguf

DATA = Path(__file__).parents[2] / "data" / "gguf"
ALIGNMENT = 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def header(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    """Return a file with `data` bytes of tensors."""
    content = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return content + bytes(-len(content) % ALIGNMENT) + bytes(data)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_what_gguf_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    values: dict[str, Any] = {"int8": -3, "uint64": 2**63, "float64": 0.1, "bool": True, "string": "ä<s>"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"of.{kind}", value)
    arrays: dict[str, list[Any]] = {"texts": ["", "b", "日本"], "ints": [1, -2, 3], "floats": [0.5, -1.5]}
    for name, items in arrays.items():
        writer.add_array(f"of.{name}", items)
    writer.add_array("of.flags", [True, False])
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(8, dtype=np.float16).reshape(4, 1, 2)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    found = read_gguf(path)
    assert found.metadata.text("general.architecture") == "llama"
    assert {kind: found.metadata.get(f"of.{kind}") for kind in values} == values
    assert {name: found.metadata.get(f"of.{name}") for name in arrays} == arrays
    assert found.metadata.get("of.flags") == [True, False]
    content = path.read_bytes()
    for name, numbers in (("first", first), ("second", second)):
        stored = found.tensors[name]
        assert stored.shape == numbers.shape
        assert stored.offset % 64 == 0
        assert content[stored.offset : stored.offset + stored.num_bytes] == numbers.tobytes()


def test_types_are_those_of_ggml() -> None:
    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    for of_activations in (9, 15):
        del sizes[of_activations]
    assert {kind: (each.name, each.block_columns, each.block_bytes) for kind, each in TENSOR_TYPES.items()} == sizes


FLOAT_ROW = tensor("a", (8,))
REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a GGUF file"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "only the magic": (b"GGUF", "the file ends within its header"),
    "version 1": (header([], [], version=1), "has version 1; supported: little-endian files of versions 2 and 3"),
    "big endian": (header([], [], version=3 << 24), "is in big-endian byte order"),
    "many tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "states 1152921504606846976 tensors: more than fit"),
    "many pairs": (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**62), "pairs of metadata: more than fit"),
    "long key": (header([struct.pack("<Q", 2**63) + bytes(16)], []), "key 1 of 1 of the metadata has a string of"),
    "long value": (header([pair("k", 8, struct.pack("<Q", 1000))], []), "ends within the value of k, which has 1000"),
    "absurd value": (header([pair("k", 8, struct.pack("<Q", 2**62))], []), "the value of k has a string of 4611"),
    "long array": (header([pair("k", 9, struct.pack("<IQ", 6, 2**61))], []), "file ends within the value of k"),
    "many items": (
        header(
            [pair("k", 9, struct.pack("<IQ", 0, 2**21) + bytes(2**21)), pair("n", 9, struct.pack("<IQB", 0, 1, 7))], []
        ),
        "the arrays up to the value of n have 2097153 items; at most 2097152",
    ),
    "many texts": (
        header([pair("k", 9, struct.pack("<IQ", 8, 2**22) + bytes(2**25))], []),
        "the value of k have 4194304 items",
    ),
    "more pairs": (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**14 + 1) + bytes(2**20),
        "16385 pairs of metadata; at most 16384",
    ),
    "more tensors": (struct.pack("<4sIQQ", b"GGUF", 3, 2**16 + 1, 0) + bytes(2**22), "65537 tensors; at most 65536"),
    "nested array": (header([pair("k", 9, struct.pack("<IQ", 9, 1))], []), "array of the type 9, which is not"),
    "unknown type": (header([pair("k", 77, b"")], []), "the value of k has the unknown type 77"),
    "not UTF-8": (header([pair("k", 8, text("ab").replace(b"ab", b"\xff\xfe"))], []), "the value of k is not UTF-8"),
    "a key twice": (header([pair("k", 7, b"\1")] * 2, []), "the metadata has k twice"),
    "alignment": (header([pair("general.alignment", 4, struct.pack("<I", 24))], []), "24, not a power of 2"),
    "no alignment": (header([pair("general.alignment", 4, bytes(4))], []), "general.alignment must be an integer"),
    "a tensor twice": (header([], [FLOAT_ROW, tensor("a", (8,), 0, 32)], 64), "tensor a is there twice"),
    "overlapping": (header([], [tensor("a", (16,)), tensor("b", (8,), 0, 32)], 64), "tensor b overlaps tensor a"),
    "unaligned": (header([], [tensor("a", (8,), 0, 8)], 64), "tensor a begins at 8, no multiple of the alignment"),
    "truncated": (header([], [FLOAT_ROW], 31), "tensor a ends at byte 96, the file at 95: truncated"),
    "far offset": (header([], [tensor("a", (8,), 0, 2**63)], 64), "tensor a ends at byte"),
    "huge": (header([], [tensor("a", (2**40, 2**40), 0)], 64), "tensor a has the impossible shape"),
    "large": (header([], [tensor("a", (2**30, 2**30), 0)], 64), "tensor a ends at byte"),
    "no columns": (header([], [tensor("a", (0, 3))]), "tensor a has the impossible shape [3, 0]"),
    "no dimension": (header([], [tensor("a", ()) + bytes(8)]), "tensor a has 0 dimensions; supported: 1 to 4"),
    "many dimensions": (header([], [tensor("a", (1,) * 5)]), "tensor a has 5 dimensions"),
    "unknown tensor": (header([], [tensor("a", (8,), 99)], 32), "tensor a has the unknown type 99"),
    "half a block": (header([], [tensor("a", (48, 2), 2)], 99), "tensor a has rows of 48 columns, Q4_0 has blocks"),
    "long name": (header([], [tensor("a" * 200, (8,))], 32), "the entry of tensor 1 of 1 has a string of 200 bytes"),
    "odd name": (header([], [tensor("\x1b[2J", (8,), 99)], 32), r"tensor '\x1b[2J' has the unknown type 99"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    path = write(tmp_path / "model.gguf", content)
    with pytest.raises(GgufError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        read_gguf(path)


def test_header_of_any_size_is_bounded(tmp_path: Path) -> None:
    """An array that fits in a sparse file, and in no memory."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(header([pair("k", 9, struct.pack("<IQ", 0, 2**40))], []))
        file.truncate(2**41)
    with pytest.raises(GgufError, match="the value of k exceeds the largest header supported, 67108864 bytes"):
        read_gguf(path)


WHOLE = (DATA / "llama-q4_k_m.gguf").read_bytes()
HEADER_BYTES = 1312


@given(places=st.lists(st.integers(0, HEADER_BYTES - 1), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_changed_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, places: list[int], seed: int
) -> None:
    """No byte of a header leads to an error of another kind, or to a tensor outside the file."""
    content, draw = bytearray(WHOLE), random.Random(seed)
    for place in places:
        content[place] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
    path = write(tmp_path_factory.getbasetemp() / "changed.gguf", bytes(content))
    tensors, message = {}, str(path)
    try:
        tensors = read_gguf(path).tensors
    except GgufError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert len(message) < 500 + len(str(path))
    assert all(each.offset + each.num_bytes <= len(content) for each in tensors.values())


@given(length=st.integers(0, len(WHOLE) - 1))
def test_truncated_files_are_refused(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = write(tmp_path_factory.getbasetemp() / "truncated.gguf", WHOLE[:length])
    with pytest.raises(GgufError, match=re.escape(str(path))):
        read_gguf(path)


def split_header(number: int, count: int, name: str, total: int = 2) -> bytes:
    pairs = [pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))]
    pairs.append(pair("split.tensors.count", 5, struct.pack("<i", total)))
    return header(pairs, [tensor(name, (8,))], 32)


def test_parts_are_one_model(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, (path, name) in enumerate(zip(paths, "ab", strict=True)):
        write(path, split_header(number, 2, name))
    found = read_gguf(paths[0])
    assert found.paths == tuple(paths)
    assert {name: each.path for name, each in found.tensors.items()} == dict(zip("ab", paths, strict=True))
    assert find_gguf(tmp_path) == paths[0]
    with pytest.raises(GgufError, match=r"a later part of a model of 2 files; give the first, m-00001-of-00002\.gguf"):
        read_gguf(paths[1])

    write(paths[1], split_header(1, 2, "a"))
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf: tensor a is in m-00001-of-00002\.gguf too"):
        read_gguf(paths[0])
    write(paths[1], split_header(0, 2, "b"))
    with pytest.raises(GgufError, match="not part 2 of 2"):
        read_gguf(paths[0])
    write(paths[0], split_header(0, 2, "a", total=3))
    write(paths[1], split_header(1, 2, "b"))
    with pytest.raises(GgufError, match=r"hold 2 tensors, split\.tensors\.count says 3"):
        read_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(GgufError, match=r"m-00002-of-00002\.gguf: cannot be read: No such file"):
        read_gguf(paths[0])
    alone = write(tmp_path / "renamed.gguf", split_header(0, 2, "a"))
    with pytest.raises(GgufError, match=r"does not end in -00001-of-00002\.gguf"):
        read_gguf(alone)


def test_file_of_a_folder(tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "nothing.gguf") is None
    assert find_gguf("owner/name") is None
    first = write(tmp_path / "a.gguf", header([], []))
    assert find_gguf(tmp_path) == find_gguf(first) == first
    second = write(tmp_path / "b.gguf", header([], []))
    with pytest.raises(GgufError, match=r"several GGUF files: a\.gguf, b\.gguf; give one of them"):
        find_gguf(tmp_path)
    assert find_gguf(second) == second
    second.unlink()
    os.mkfifo(second)  # a read of it would wait for a writer
    (tmp_path / "c.gguf").mkdir()
    assert find_gguf(tmp_path) == first
    assert find_gguf(second) is None
    write(tmp_path / "config.json", b"{}")
    assert find_gguf(tmp_path) is None
    assert find_gguf(tmp_path / "config.json") is None


def test_values_are_checked(tmp_path: Path) -> None:
    pairs = [
        pair("text", 8, text("a")),
        pair("flag", 7, b"\1"),
        pair("infinite", 6, struct.pack("<f", float("inf"))),
        pair("texts", 9, struct.pack("<IQ", 8, 1) + text("a")),
        pair("numbers", 9, struct.pack("<IQ2f", 6, 2, 1.0, 2.0)),
    ]
    metadata = read_gguf(write(tmp_path / "model.gguf", header(pairs, []))).metadata
    for call, message in (
        (lambda: metadata.text("flag"), "metadata flag must be a string"),
        (lambda: metadata.text("absent"), "metadata absent is missing"),
        (lambda: metadata.integer("flag"), "metadata flag must be an integer of at least 1, not True"),
        (lambda: metadata.number("infinite"), "metadata infinite must be a finite number, not inf"),
        (lambda: metadata.number("flag"), "metadata flag must be a finite number"),
        (lambda: metadata.flag("text"), "metadata text must be true or false, not 'a'"),
        (lambda: metadata.texts("numbers"), "metadata numbers must be an array of strings"),
        (lambda: metadata.integers("numbers"), "metadata numbers must be an array of integers"),
        (lambda: metadata.numbers("texts"), "metadata texts must be an array of numbers"),
    ):
        with pytest.raises(GgufError, match=re.escape(message)):
            call()
    assert metadata.numbers("numbers") == [1.0, 2.0]
    assert metadata.integer("absent", 7) == 7
