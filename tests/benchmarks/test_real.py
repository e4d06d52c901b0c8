"""`real`: its requests, and that every system gets the file itself."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import real
from benchmarks.common.rows import BenchmarkError
from benchmarks.peers.gguf_file import gguf_of
from benchmarks.serving.opening import CADENZA, IK_LLAMA, LLAMA, STORED, VLLM, chosen_systems, model_path, systems_with


def test_requests_of_the_scenarios() -> None:
    sizes = {name: [(len(each.prompt), each.output_len) for each in real.requests_of(name, 1, 50_000)]
             for name in real.SCENARIOS}  # fmt: skip
    assert sizes["decode1"] == [(16, 128)]
    assert sizes["decode16"] == [(16, 128)] * 16
    assert sizes["prompt512"] == [(512, 1)]
    assert sizes["prompts128"] == [(128, 1)] * 12
    assert real.requests_of("prompt512", 1, 50_000) == real.requests_of("prompt512", 1, 50_000)


def test_every_system_reads_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "any.gguf"
    assert gguf_of(path, tmp_path, STORED) == model_path(path, STORED) == path
    assert systems_with(STORED) == (CADENZA, LLAMA, IK_LLAMA)
    pythons = dict.fromkeys(("vllm_python", "llama_python", "ik_llama_python", "openvino_python"))
    with pytest.raises(BenchmarkError, match="--systems vllm: not with"):
        chosen_systems(argparse.Namespace(systems=[VLLM], **pythons), (CADENZA,), STORED)
