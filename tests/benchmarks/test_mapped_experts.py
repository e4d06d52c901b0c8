"""`mapped_experts`: a row for each measure, of a tiny mixture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from tests.checkpoints import make_checkpoint


@pytest.mark.slow
def test_rows_of_a_tiny_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"vocab_size": 2048, "max_position_embeddings": 1024}
    folder = make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16, **shape)
    options = ["--model", str(folder), "--threads", "1", "--steps", "1", "--repeats", "2", "--json"]
    assert main(["mapped_experts", *options, "--quiet-wait-s", "0"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["params"]["measure"] for row in rows] == ["decode1", "decode16", "prompt512"]
    for row in rows:
        assert row["medians"].keys() == {"memory_ms", "mapped_ms", "cold_ms"}
        assert min(row["medians"].values()) > 0
