"""Mixtures that are divided among ranks: transformers' logits, bits in chunks, and what each rank reads."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from executor_svc.config import ExecutorConfig
from executor_svc.models.base import ModelConfigError
from executor_svc.models.folder import LoaderError
from executor_svc.models.parallel.split import check_split
from executor_svc.models.safetensors_file import StoredTensor
from executor_svc.ranks.members import SharedMemory
from executor_svc.startup.rank_kernels import make_ranks
from tests.checkpoints import make_checkpoint
from tests.executor_svc.driver import Driver, Model, Tokens
from tests.executor_svc.models.model_configs import read
from tests.golden.test_mixtures import CASES, gpt_oss_in_mxfp4
from tests.helpers.executor.rank_threads import RankThreads, on_ranks
from tests.helpers.marks import short_and_long
from tests.helpers.models.gguf_files import all_of, write_gguf
from tests.helpers.models.golden import random_prompts, teacher_forced, transformers_greedy, transformers_model
from tests.helpers.models.quantized_layouts import quantize_checkpoint

FAMILIES = {
    "gemma4": 2,
    "llama4": 2,
    "deepseek_v3": 2,
    "ernie4_5_moe": 2,
    "ernie4_5_moe with biases": 2,
    "glm4_moe": 2,
    "gpt_oss": 2,
    "granitemoe": 4,
    "hunyuan_v1_moe": 2,
    "minimax_m2": 2,
    "mixtral": 4,
    "olmoe": 4,
    "qwen2_moe": 2,
    "qwen3_moe": 2,
}
"""And a number of ranks; four of them have an expert or two each of Granite's six, and the same KV heads as others."""
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}


def logits_of(threads: RankThreads, tokens: list[int], *chunks: int) -> Tensor:
    """Return rank 0's logits of a text, in chunks and then the rest."""

    def run(rank: int) -> Tensor:
        model = threads.models[rank]
        own = replace(model.loaded, geometry=model.loaded.own_geometry)
        driver = Driver(own, model.device, ExecutorConfig(**threads.options))
        sequence = Tokens(tokens, num_prompt=len(tokens))
        return torch.cat([driver.step([(sequence, count)])[0] for count in (*chunks, len(tokens) - sum(chunks))])

    return on_ranks(threads.size, run)[0]


@pytest.mark.parametrize(
    "family",
    short_and_long(
        FAMILIES,
        [
            "deepseek_v3",
            "ernie4_5_moe with biases",
            "gemma4",
            "glm4_moe",
            "gpt_oss",
            "granitemoe",
            "olmoe",
            "qwen2_moe",
        ],
    ),
)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """And the bits of a row do not depend on the rows beside it."""
    model_type, shape = CASES[family]
    folder = make_checkpoint(tmp_path, model_type, **shape)
    reference, (prompt,) = transformers_model(folder), random_prompts(131, (50,))
    tokens = [*prompt, *transformers_greedy(reference, prompt, 16).tokens]
    expected = teacher_forced(reference, tokens)
    threads = RankThreads(folder, FAMILIES[family], {"dtype": "float32"})
    found = logits_of(threads, tokens, 20, 13)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert found[49:-1].argmax(-1).tolist() == tokens[50:]
    assert torch.equal(logits_of(threads, tokens, *([1] * 9), 50), found)


@pytest.mark.parametrize(
    "kind",
    short_and_long(["int4", "gptq", "fp8 in blocks", "mxfp4", "gpt-oss", "GGUF"], ["int4", "gpt-oss", "GGUF"]),
)
def test_in_few_bits(tmp_path: Path, kind: str) -> None:
    """The same numbers as undivided, but for the order of sums."""
    options: dict[str, Any] = {"dtype": "float32", "quantized_activations": "off"}
    if kind == "gpt-oss":
        folder, _ = gpt_oss_in_mxfp4(tmp_path)
    else:
        folder = make_checkpoint(tmp_path / "dense", "qwen2_moe" if kind == "int4" else "qwen3_moe", **WIDE)
    if kind == "int4":
        options["quantization"] = kind
    elif kind == "GGUF":
        folder = write_gguf(folder, tmp_path / "model.gguf", all_of(Type.Q8_0))
    elif kind != "gpt-oss":
        quantize_checkpoint(folder, kind, tmp_path / "quantized", tmp_path / "again")
        folder = tmp_path / "quantized"
    (tokens,) = random_prompts(131, (50,))
    threads, model = RankThreads(folder, 2, options), Model(folder, **options)
    whole, halves = model.whole(tokens), logits_of(threads, tokens, 20)
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))
    wanted, found = model.loaded.geometry, threads.first.loaded.geometry
    assert found.num_parameters == wanted.num_parameters
    assert abs(found.weight_bytes - wanted.weight_bytes) < 0.02 * wanted.weight_bytes


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_each_rank_reads_its_own_experts_alone(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of experts by name, and of those of all in one tensor: together the ranks read each once."""
    folder, original = make_checkpoint(tmp_path, family), StoredTensor._read
    counts = Counter[str]()

    def read_and_count(stored: StoredTensor, file: Any, block: Tensor) -> None:
        counts[stored.name] += block.nbytes
        original(stored, file, block)

    monkeypatch.setattr(StoredTensor, "_read", read_and_count)
    RankThreads(folder, 2, {"dtype": "float32"})
    of_experts = re.compile(r".*(experts|put_linear).*")
    held = sum(each.nbytes for name, each in load_file(folder / "model.safetensors").items() if of_experts.match(name))
    assert held == sum(count for name, count in counts.items() if of_experts.match(name)) > 0


def test_experts_that_a_checkpoint_has_too_many_are_refused(tmp_path: Path) -> None:
    """By each rank, though most tensors of experts are not its own."""
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.ones(24, 40)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(LoaderError, match=r"1 tensors that the model does not use: .*experts\.8\.up_proj"):
        RankThreads(folder, 2, {"dtype": "float32"})


@pytest.mark.parametrize(
    ("family", "change", "size", "message"),
    [
        ("mixtral", {}, 16, r"num_experts \d are fewer than 16 ranks"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 41},
            2,
            "intermediate size of shared experts, 41 cannot be div",
        ),
    ],
)
def test_what_cannot_be_divided(family: str, change: dict[str, Any], size: int, message: str) -> None:
    spec = replace(read(family, **change), num_heads=16, num_kv_heads=16)
    with pytest.raises(ModelConfigError, match=message):
        check_split(spec, size)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_moe", "mixtures of experts are not divided among GPUs so far"),
        ("olmo2", "q_norm and k_norm normalize all heads together, which GPUs have parts of"),
        ("granite_h", "mamba_n_groups 1: each group has a norm, of which 2 GPUs would have parts"),
    ],
)
def test_what_gpus_do_not_divide(family: str, message: str) -> None:
    device: Any = SimpleNamespace(name="cuda")
    config = ExecutorConfig(model="any", device="cuda", tensor_parallel_size=2)
    fields = {"num_local_experts": 0, "mamba_n_groups": 1} if family == "granite_h" else {}
    with pytest.raises(ModelConfigError, match=message):
        make_ranks(device, 0, config, read(family, **fields), SharedMemory(-1), lambda size: None)
