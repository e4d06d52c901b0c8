"""Tensors as a model gets them from the files of its folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor_svc.models.checkpoint import SafetensorsWeights

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_outlives_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """It is no view of a mapping, which would be resident as a whole, and whose bytes are the file's."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(5000, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.bfloat16)}, file)
    weights = SafetensorsWeights(tmp_path, dtype, CPU)
    tensor = weights.get("a", (5000,))
    del weights
    if sys.platform == "linux":
        assert str(file) not in Path("/proc/self/maps").read_text()
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert torch.equal(tensor, torch.arange(5000, dtype=torch.bfloat16).to(dtype))
