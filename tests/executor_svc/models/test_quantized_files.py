"""Linears in few bits as the packages write them, against the packages' own dequantization, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.files.checkpoint import SafetensorsWeights
from executor_svc.models.quantized.method import read_quantization
from tests.helpers.models.quantized_layouts import LAYOUTS

CPU = torch.device("cpu")
FILES = sorted((Path(__file__).parent / "quantized_files").glob("*.safetensors"))
WHOLE_ROWS = {"w8a8"}
IN_ANOTHER_ORDER = {"gptq_4_desc_act"}
WITHOUT_ZERO_POINTS = {"w4a16", "w8a16_channel", "w8a8", "gptq_4"}


def open_weights(folder: Path, file: Path) -> tuple[SafetensorsWeights, Tensor]:
    """Return a file as a checkpoint, and the weight that is expected of its linear."""
    shutil.copy(file, folder / "model.safetensors")
    with safe_open(file, framework="pt") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    quantization = read_quantization(folder, {"quantization_config": config})
    assert quantization is not None
    return SafetensorsWeights(folder, torch.float32, CPU, quantization), load_file(file)["expected"]


def open_linear(weights: SafetensorsWeights, shape: tuple[int, int]) -> QuantRows:
    rows = weights.open_linear("linear", shape)
    assert isinstance(rows, QuantRows)
    return rows


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_linear_equals_the_packages_dequantization(file: Path, tmp_path: Path) -> None:
    weights, expected = open_weights(tmp_path, file)
    rows = open_linear(weights, (32, 64))
    assert torch.equal(DequantizedRows(rows, torch.float32, CPU).whole(), expected)
    assert rows.whole_row_activations == (file.stem in WHOLE_ROWS)
    assert (rows.column_order is not None) == (file.stem in IN_ANOTHER_ORDER)
    if rows.format.values == "integer":
        assert (rows.format.offsets == "none") == (file.stem in WITHOUT_ZERO_POINTS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_blocks_of_any_size_are_the_same_numbers_of_the_same_digest(file: Path, tmp_path: Path) -> None:
    digests, codes = set(), []
    for num_bytes in (1, 5 * 64, 24 * 64, 1 << 20):
        weights, _ = open_weights(tmp_path, file)
        blocks = [block.codes.clone() for block in open_linear(weights, (32, 64)).blocks(num_bytes, 1)]
        assert all(code.dtype == torch.uint8 for code in blocks)
        codes.append(torch.cat(blocks))
        weights.check_all_used(lambda name: name == "expected")
        digests.add(weights.digest())
        assert weights.num_parameters == 32 * 64
    assert all(torch.equal(each, codes[0]) for each in codes)
    assert len(digests) == 1


def test_files_of_all_layouts_are_there() -> None:
    assert len(FILES) == 14


def test_blocks_take_their_multiple(tmp_path: Path) -> None:
    for file in FILES:
        weights, _ = open_weights(tmp_path, file)
        assert [len(block) for block in open_linear(weights, (32, 64)).blocks(1, 16)] == [16, 16]


@pytest.mark.parametrize("layout", ["w4a16 with zero points", "gptq", "gptq of 8 bits", "awq"])
def test_as_few_rows_as_a_word_has_codes(layout: str, tmp_path: Path) -> None:
    config, pack = LAYOUTS[layout]
    tensors, expected = pack(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    save_file({f"linear.{name}": each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
    quantization = read_quantization(tmp_path, {"quantization_config": config})
    rows = open_linear(SafetensorsWeights(tmp_path, torch.float32, CPU, quantization), (8, 64))
    torch.testing.assert_close(DequantizedRows(rows, torch.float32, CPU).whole(), expected)
