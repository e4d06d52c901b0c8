"""Experts that stay in their files: the bits of those in memory, and what is refused by the option's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.cpu.device import CpuDevice
from executor_svc.cpu.file_linear import CpuFileLinear
from executor_svc.device.interface import DeviceError
from executor_svc.models.folder import LoaderError
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Model
from tests.executor_svc.models.test_divided_mixtures import logits_of
from tests.golden.test_mixtures import gpt_oss_in_mxfp4
from tests.helpers.executor.rank_threads import RankThreads
from tests.helpers.models.gguf_files import Kinds, all_of, write_gguf
from tests.helpers.models.golden import check_bits_of_chunks, random_prompts
from tests.helpers.models.quantized_layouts import quantize_checkpoint

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
OF_256: dict[str, Any] = {**WIDE, "hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
(PROMPT,) = random_prompts(131, (40,))


def mixed(name: str) -> Type:
    """Return other types for gate, up and down."""
    parts = {"ffn_gate_exps": Type.Q4_K, "ffn_up_exps": Type.Q6_K, "ffn_down_exps": Type.Q5_K}
    return next((kind for part, kind in parts.items() if part in name), Type.Q8_0)


def check_same(path: Path, **options: Any) -> Model:
    """Check that a model has the same bits and the same digest with its experts mapped; return that one."""
    memory, mapped = (Model(path, **options, expert_weights=where) for where in ("memory", "mapped"))
    assert torch.equal(mapped.whole(PROMPT), memory.whole(PROMPT))
    assert mapped.loaded.weights_digest == memory.loaded.weights_digest
    assert mapped.device.few_bits.forms == memory.device.few_bits.forms
    return mapped


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_experts(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """By name, or all in one tensor; gate and up whose rows are no whole panels."""
    model = check_same(make_checkpoint(tmp_path, family, dtype=dtype))
    check_bits_of_chunks(model)


@pytest.mark.parametrize(
    ("family", "shape", "kinds"),
    [
        ("qwen3_moe", OF_256, mixed),
        ("gpt_oss", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}, all_of(Type.Q8_0)),
        ("glm4_moe", WIDE, all_of(Type.Q5_0)),
    ],
)
def test_gguf(tmp_path: Path, family: str, shape: dict[str, Any], kinds: Kinds) -> None:
    folder = make_checkpoint(tmp_path, family, **shape)
    model = check_same(write_gguf(folder, tmp_path / "model.gguf", kinds), dtype="bfloat16")
    check_bits_of_chunks(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_oss_in_mxfp4(tmp_path: Path, dtype: str) -> None:
    """Scales are apart from codes, and rows of gate and up neighbours."""
    check_same(gpt_oss_in_mxfp4(tmp_path)[0], dtype=dtype)


def test_two_ranks_map_their_own_experts(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe")
    found = [
        logits_of(RankThreads(folder, 2, {"dtype": "float32", "expert_weights": where}), PROMPT, 20)
        for where in ("memory", "mapped")
    ]
    assert torch.equal(*found)


def in_few_bits(folder: Path) -> Path:
    quantize_checkpoint(make_checkpoint(folder / "made", "qwen3_moe", **WIDE), "gptq", folder / "few", folder / "dense")
    return folder / "few"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            lambda folder: make_checkpoint(folder, "llama"),
            {},
            "--expert-weights mapped: LlamaForCausalLM has no experts",
        ),
        (in_few_bits, {}, r"--expert-weights mapped: .*experts\.0\.gate_proj: its numbers do not lie in the file"),
        (
            lambda folder: make_checkpoint(folder, "gpt_oss"),
            {},
            r"mapped: .*experts\.0\.gate_proj: its numbers do not lie in the file as they are used",
        ),
        (
            lambda folder: make_checkpoint(folder, "qwen3_moe"),
            {"dtype": "bfloat16"},
            r"mapped: .*experts\.0\.gate_proj: it is F32 in the file, and the model runs in torch.bfloat16",
        ),
        (
            lambda folder: make_checkpoint(folder, "qwen3_moe", **WIDE),
            {"quantization": "int4"},
            r"mapped: .*experts\.0\.gate_proj: its numbers do not lie",
        ),
    ],
)
def test_what_cannot_be_mapped(
    tmp_path: Path, make: Callable[[Path], Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoaderError, match=message):
        Model(make(tmp_path), expert_weights="mapped", **options)


def test_a_type_without_a_kernel_is_refused_by_its_tensor(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe", **OF_256)
    path = write_gguf(folder, tmp_path / "model.gguf", lambda name: Type.TQ1_0 if "_exps" in name else Type.Q8_0)
    with pytest.raises(LoaderError, match=r"mapped: .*gate_proj: there is no kernel that reads TQ1_0 from a file"):
        Model(path, expert_weights="mapped")


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    read = CpuFileLinear.read
    monkeypatch.setattr(CpuFileLinear, "read", lambda linear: (os.utime(folder / "model.safetensors"), read(linear))[1])
    with pytest.raises(DeviceError, match=r"--expert-weights mapped: .*safetensors: the file has changed while it was"):
        Model(folder, expert_weights="mapped")


def test_a_file_that_is_cut_is_an_error(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe") / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(LoaderError, match="not a readable safetensors file"):
        Model(tmp_path, expert_weights="mapped")


def test_nan_in_an_expert_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe") / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.3.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(LoaderError, match="hold NaN or infinite numbers"):
        Model(tmp_path, expert_weights="mapped")


def test_keys_and_values_leave_room_for_experts_that_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have what is left beside all experts, as if these were in memory, or half of what there is."""
    folder, blocks = make_checkpoint(tmp_path, "qwen3_moe"), []
    for where, free in (("memory", 2_000_000), ("mapped", 2_000_000), ("mapped", 200_000)):
        model = Model(folder, expert_weights=where)
        assert isinstance(model.device, CpuDevice)
        of_files = 0 if model.device._files is None else model.device._files.num_bytes
        monkeypatch.setattr("executor_svc.cpu.device.free_memory_bytes", lambda free=free + of_files: free)
        config = ExecutorConfig(model=str(folder), device="cpu", max_num_seqs=1000, max_model_len=512)
        pools = model.device.new_kv_cache(model.loaded.geometry, config)
        blocks.append(pools.num_device_blocks * pools.bytes_per_block)
        monkeypatch.undo()
    assert blocks[0] == blocks[1] > 500_000
    assert 0.1 < blocks[2] / (200_000 + of_files) < 0.25
