"""What the CPU device knows of its machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.cpu_memory import cgroup_free_bytes
from executor_svc.models.quantized.method import has_integers

_PAGES = "anon 500\nfile 360\ninactive_file 300\nactive_file 40\nshmem 20\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n"}, 600),
        (
            {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": _PAGES},
            100 + 300 + 40,
        ),
        ({"memory.max": "max\n", "memory.current": "400\n"}, None),
        ({"memory.max": "300\n", "memory.current": "400\n"}, 0),
        ({"memory/memory.limit_in_bytes": "900\n", "memory/memory.usage_in_bytes": "100\n"}, 800),
        (
            {
                "memory/memory.limit_in_bytes": "900\n",
                "memory/memory.usage_in_bytes": "800\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 50\n",
            },
            350,
        ),
        ({"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "no numbers\n"}, 600),
        ({}, None),
    ],
)
def test_a_containers_memory_limit_is_seen(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_free_bytes(tmp_path) == free


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("options", "checkpoint", "few_bits", "expected"),
    [
        ({}, "bfloat16", False, (BF16, BF16, BF16)),
        ({}, "bfloat16", True, (F32, BF16, BF16)),
        ({"cpu_isa": "avx2"}, "bfloat16", True, (F32, BF16, BF16)),
        ({"quantized_activations": "off"}, "bfloat16", True, (BF16, BF16, BF16)),
        ({"dtype": "bfloat16"}, "bfloat16", True, (BF16, BF16, BF16)),
        ({"dtype": "float32"}, "bfloat16", True, (F32, F32, F32)),
        ({}, "float16", True, (F32, F32, F32)),
        ({}, "float32", True, (F32, F32, F32)),
    ],
)
def test_data_types_of_activations_cache_and_matrices(
    options: dict[str, Any], checkpoint: str, few_bits: bool, expected: tuple[torch.dtype, ...]
) -> None:
    device = CpuDevice(ExecutorConfig(model="any", device="cpu", num_threads=1, **options))
    device.adopt_dtype(checkpoint, few_bits=few_bits)
    assert (device.dtype, device.kv_dtype, device.matrix_dtype) == expected


def _groups(*weights: dict[str, Any]) -> dict[str, Any]:
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": each} for index, each in enumerate(weights)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, False),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, True),
        ({"quantization_config": {"quant_method": "fp8"}}, False),
        (_groups({"type": "int", "num_bits": 4}), True),
        (_groups({"type": "float", "num_bits": 8}), False),
        (_groups({"type": "float", "num_bits": 4}), True),
        (_groups({"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}), True),
    ],
)
def test_checkpoints_whose_products_may_be_of_integers(tmp_path: Path, content: dict[str, Any], expected: bool) -> None:
    assert has_integers(tmp_path, content) == expected
