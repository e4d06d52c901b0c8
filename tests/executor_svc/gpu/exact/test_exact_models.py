"""All kinds of layers on the GPU's kernels in exact mode: requests' bits in chunks and beside others, and alone.

With another executor now and then. No product is PyTorch's, which would be cuBLAS's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.models.adapters.places import AdapterSizes
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.gpu.exact.products import without_products
from tests.helpers.core.core_chats import Outcome, Setting
from tests.helpers.core.gpu_rig import GpuRig, shortest_load
from tests.helpers.marks import short_and_long
from tests.helpers.models.peft_adapters import save_peft_adapter
from tests.helpers.models.quantized_layouts import quantize_checkpoint

pytestmark = pytest.mark.slow

ALONE = Setting(num_blocks=64, max_num_batched_tokens=96, depth=1, arrivals="alone")
CHUNKS = Setting(block_size=8, num_blocks=96, max_num_batched_tokens=23, max_num_seqs=6, loses_every=5)
LLAMA = ("llama", {"num_hidden_layers": 1, "head_dim": 64, "hidden_size": 64, "intermediate_size": 96})
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", {"num_hidden_layers": 1, "head_dim": 64}, {}),
    "experts in int8": ("qwen3_moe", {"num_hidden_layers": 1, "head_dim": 64}, {"quantization": "int8"}),
    "windows and caps": ("gemma2", {"num_hidden_layers": 2, "head_dim": 64}, {}),
    "sinks and experts": ("gpt_oss", {"num_hidden_layers": 2, "head_dim": 64}, {}),
    "latents": ("deepseek_v3", {"num_hidden_layers": 2}, {}),
    "delta rule": (
        "qwen3_5_delta",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {},
    ),
    "mamba": ("granite_h", {}, {}),
    "convolutions": ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, {}),
    "a cache in fp8": (*LLAMA, {"kv_cache_dtype": "fp8"}),
    "weights in fp8": (*LLAMA, {"quantization": "fp8"}),
    "float32": (*LLAMA, {"dtype": "float32"}),
}
SHORT = ("experts", "latents", "a cache in fp8")


def compare(model: Model, setting: Setting = CHUNKS, alone: Setting = ALONE, **how: Any) -> Outcome:
    load = shortest_load()
    if how:
        load = [replace(each, spec=replace(each.spec, adapter_index=index)) for index, each in enumerate(load, 1)]
    with without_products():
        expected = GpuRig(model, alone, **how).run(load)
        found = GpuRig(model, setting, **how).run(load)
    assert len(expected) == 2
    assert found == expected
    return expected


@pytest.mark.parametrize("name", short_and_long([*MODELS], [*SHORT]))
def test_bits_are_those_of_a_request_alone(name: str, tmp_path: Path, ordered_products: None) -> None:
    family, shape, options = MODELS[name]
    folder = make_checkpoint(tmp_path, family, vocab_size=131, dtype=torch.bfloat16, **shape)
    compare(Model(folder, device="cuda", numerics="exact", **{"dtype": "bfloat16"} | options))


@pytest.mark.parametrize("layout", short_and_long(["gptq", "w4a16 with actorder", "fp8"], ["gptq"]))
def test_weights_in_few_bits(layout: str, tmp_path: Path, ordered_products: None) -> None:
    family, shape = LLAMA
    folder = make_checkpoint(tmp_path / "whole", family, vocab_size=131, dtype=torch.bfloat16, **shape)
    quantize_checkpoint(folder, layout, tmp_path / "few bits", tmp_path / "dense")
    model = Model(tmp_path / "few bits", device="cuda", numerics="exact", dtype="bfloat16")
    assert model.device.few_bits.forms
    compare(model)


def test_adapters(tmp_path: Path, ordered_products: None) -> None:
    """Two of different ranks, each alone and both in one batch."""
    family, shape = LLAMA
    folder = make_checkpoint(tmp_path / "model", family, vocab_size=131, dtype=torch.bfloat16, **shape)
    folders = {}
    for index, rank in ((1, 3), (2, 17)):
        folders[index] = tmp_path / str(index)
        save_peft_adapter(folder, folders[index], seed=index, r=rank, target_modules=["q_proj", "down_proj", "lm_head"])
    model = Model(folder, AdapterSizes(2, 20), device="cuda", numerics="exact", dtype="bfloat16")
    places = {"max_loras": 2, "max_cpu_loras": 2}
    expected = compare(model, replace(CHUNKS, **places), replace(ALONE, **places), adapters=folders)
    assert compare(model) != expected
