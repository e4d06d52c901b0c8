"""A rank's part of a linear in few bits: the numbers that are cut in memory, from its own bytes of the file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cadenza_common.gguf.file import read_gguf
from executor_svc.device.dense_rows import DequantizedRows
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import ModelConfigError
from executor_svc.models.gguf.tensor_names import TensorNames
from executor_svc.models.gguf.weights import GgufWeights
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.quant_part import QuantPart
from executor_svc.models.safetensors_file import StoredTensor
from tests.checkpoints import make_checkpoint
from tests.executor_svc.models.test_quantized_files import CPU, FILES, IN_ANOTHER_ORDER, open_linear, open_weights

ROWS, COLUMNS = 32, 64
PARTS = {
    "rows": Part((range(16, 32),), False, ROWS),
    "rows of fused linears": Part((range(8), range(16, 24)), False, ROWS),
    "columns": Part((range(32, 64),), True, COLUMNS),
}
BLOCKS_OF_16 = {"fp8_block"}
"""Files whose scales are shared by so many rows: 8 of them cannot be read alone."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read."""
    original, sizes = StoredTensor._read, list[int]()
    monkeypatch.setattr(StoredTensor, "_read", lambda *args: (sizes.append(args[2].nbytes), original(*args))[1])
    return sizes


def dequantized(rows: QuantRows) -> torch.Tensor:
    return DequantizedRows(rows, torch.float32, CPU).whole()


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_part_of_every_format(file: Path, name: str, tmp_path: Path, read: list[int]) -> None:
    part = PARTS[name]
    weights, expected = open_weights(tmp_path, file)
    whole = open_linear(weights, (ROWS, COLUMNS))
    if part.of_columns and file.stem in IN_ANOTHER_ORDER:
        with pytest.raises(ModelConfigError, match="act-order"):
            QuantPart("linear", whole, part)
        return
    in_memory = QuantPart("linear", whole, part)
    found = weights.open_linear_part("linear", whole, in_memory, part)
    picked = torch.cat([torch.arange(each.start, each.stop) for each in part.ranges])
    wanted = expected.index_select(1 if part.of_columns else 0, picked)
    if whole.column_order is not None:
        wanted = wanted.index_select(1, whole.column_order)
    read.clear()
    assert torch.equal(dequantized(found), expected_in_order(wanted, whole))
    alone, parameters = sum(read), weights.num_parameters
    assert parameters == ROWS * COLUMNS
    weights.check_all_used(lambda stored: stored == "expected")
    digest = weights.digest()
    if file.stem in BLOCKS_OF_16 and len(part.ranges) > 1:
        assert found is in_memory
        return
    read.clear()
    assert torch.equal(dequantized(in_memory), expected_in_order(wanted, whole))
    assert alone < sum(read)
    # Half of the codes; of the scales as much as belongs to them.
    codes = ROWS * COLUMNS * whole.format.bits // 8
    assert codes // 2 <= alone <= sum(read) - codes // 2
    assert digest != weights.digest()


def expected_in_order(wanted: torch.Tensor, whole: QuantRows) -> torch.Tensor:
    """`DequantizedRows` gives columns in the order of the model."""
    return wanted if whole.column_order is None else wanted.index_select(1, whole.column_order.argsort())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_a_part_of_a_gguf_file(kind: str, tmp_path: Path, read: list[int]) -> None:
    """Rows of heads that llama.cpp has stored in another order, and columns in blocks of 32."""
    gguf_files = pytest.importorskip("tests.helpers.models.gguf_files")
    sizes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 16}
    folder = make_checkpoint(tmp_path / "dense", "llama", **sizes)
    path = gguf_files.write_gguf(folder, tmp_path / "model.gguf", gguf_files.all_of(getattr(gguf_files.Type, kind)))
    weights = GgufWeights(read_gguf(path), TensorNames("llama", 16), torch.float32, CPU)
    for prefix, part in (
        ("model.layers.0.self_attn.q_proj", Part((range(16, 32),), False, 64)),
        ("model.layers.0.mlp.down_proj", Part((range(256, 512),), True, 512)),
    ):
        shape = (512, 512) if part.of_columns else (64, 512)
        whole = weights.open_linear(prefix, shape)
        (chosen,) = part.ranges
        if isinstance(whole, QuantRows):
            everything = dequantized(whole)
            found = weights.open_linear_part(prefix, whole, QuantPart(prefix, whole, part), part)
            read.clear()
            values = dequantized(found)
            share = whole.num_bytes // (2 if part.of_columns else 4)
        else:
            everything = whole.whole()
            read.clear()
            values = weights.open_part(f"{prefix}.weight", shape, part).whole()
            share = values.numel() * 2
        assert sum(read) == share
        wanted = (
            everything[:, chosen.start : chosen.stop] if part.of_columns else everything[chosen.start : chosen.stop]
        )
        assert torch.equal(values, wanted)
