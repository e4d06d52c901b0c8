"""Mixtures of experts against transformers: greedy tokens, logits, and bits under chunking."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import MIXTURES, blend, edit_config, make_checkpoint
from tests.executor_svc.driver import Model
from tests.golden.test_model_families import serve
from tests.golden.test_newer_families import LENGTHS, NEW_TOKENS, VOCABULARY, check_greedy
from tests.helpers.models.golden import (
    check_bfloat16,
    check_bits_of_chunks,
    random_prompts,
    transformers_greedy,
    transformers_model,
)
from tests.helpers.models.quantized_layouts import mxfp4, quantize_checkpoint
from tests.helpers.models.stacked_experts import by_expert, stack_again
from tests.helpers.services import executor_service, scheduler_service

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MIXTURES},
    "deepseek_v3 of halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "n_shared_experts": 2}),
    "ernie4_5_moe with biases": ("ernie4_5_moe", {"use_bias": True, "moe_layer_start_index": 0}),
    "hunyuan_v1_moe by layer": ("hunyuan_v1_moe", {"moe_topk": [1, 3]}),
    "olmoe with biases": ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    "qwen3_moe with windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 24}),
    "gemma4": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
    "llama4": ("llama4_text", {"moe_layers": [1, 3], "num_local_experts": 4, "intermediate_size": 32}),
    "llama4 of two experts": (
        "llama4_text",
        {"moe_layers": None, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "qwen2_moe of shares": ("qwen2_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}),
}


@pytest.mark.parametrize("name", CASES)
def test_family(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_greedy(folder, folder)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_bits_in_bfloat16(tmp_path: Path, name: str) -> None:
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path, family, **shape)
    check_bits_of_chunks(check_bfloat16(folder, random_prompts(VOCABULARY, (90,))[0], median=True))


ODD: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"kv_lora_rank": 13, "q_lora_rank": 11, "v_head_dim": 9, "n_routed_experts": 15, "n_group": 5},
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 3, "head_dim": 10},
    "minimax_m2": {"num_local_experts": 5},
}
"""Sizes of no whole vectors; routers in float32 read rows of an odd length."""


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_in_bfloat16(tmp_path: Path, name: str) -> None:
    shape = {"hidden_size": 45, "intermediate_size": 21, "moe_intermediate_size": 17}
    folder = make_checkpoint(tmp_path, name, **shape, **ODD[name])
    (prompt,) = random_prompts(VOCABULARY, (90,))
    check_bits_of_chunks(check_bfloat16(folder, prompt, median=True, experts="batched_mm"))


FEW_BITS = [
    *(("qwen3_moe", layout) for layout in ("gptq", "gptq with desc_act", "awq", "w4a16", "fp8 in blocks", "mxfp4")),
    ("gemma4", "w4a16"),
    ("gpt_oss", "w4a16"),
    ("glm4_moe", "fp8 in blocks"),
    ("granitemoe", "w4a16"),
    ("llama4", "w4a16 with actorder"),
    ("mixtral", "awq"),
    ("phimoe", "gptq with desc_act"),
    ("qwen2_moe", "w8a8"),
]
_SIZES = ("hidden_size", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size")
WIDE = {**dict.fromkeys(_SIZES, 64), "head_dim": 16, "global_head_dim": 32}
"""Columns in whole groups."""
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": False},
    "phimoe": {"rope_parameters": None},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "layout"), FEW_BITS)
def test_experts_in_few_bits(tmp_path: Path, name: str, layout: str) -> None:
    """Greedy tokens are those of transformers on the dequantized weights; each expert is a linear by itself."""
    family, shape = CASES[name]
    folder = make_checkpoint(tmp_path / "made", family, **{**shape, **WIDE, **OF_FAMILIES.get(family, {})})
    by_expert(folder)
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    quantize_checkpoint(folder, layout, quantized, dense)
    stack_again(dense)
    check_greedy(quantized, dense, dtype="float32", quantized_activations="off")


def gpt_oss_in_mxfp4(folder: Path) -> tuple[Path, Path]:
    """Return a gpt-oss with blocks and scales of all experts in one tensor each, as released, and the same dense."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    dense = make_checkpoint(folder / "dense", "gpt_oss", **shape)
    tensors, few_bits = load_file(dense / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            few_bits[name] = tensor
            continue
        packed, rounded = zip(*(mxfp4(matrix.t().contiguous()) for matrix in tensor), strict=True)
        tensors[name] = torch.stack(rounded).transpose(1, 2).contiguous()
        codes = torch.stack([each["weight_packed"] for each in packed])
        few_bits[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
        few_bits[f"{name}_scales"] = torch.stack([each["weight_scale"].view(torch.uint8) for each in packed])
    save_file(tensors, dense / "model.safetensors", {"format": "pt"})
    quantized = folder / "quantized"
    quantized.mkdir()
    save_file(few_bits, quantized / "model.safetensors", {"format": "pt"})
    (quantized / "config.json").write_bytes((dense / "config.json").read_bytes())
    edit_config(quantized, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return quantized, dense


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    check_greedy(*gpt_oss_in_mxfp4(tmp_path), dtype="float32", quantized_activations="off")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_experts_rounded_at_load(tmp_path: Path, bits: str) -> None:
    folder = make_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64, head_dim=16)
    rounded = Model(folder, quantization=bits, quantized_activations="off", dtype="bfloat16")
    check_bits_of_chunks(rounded)
    assert rounded.device.few_bits.forms


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "gemma4"])
def test_what_is_saved_in_few_bits_is_the_model_that_saved_it(tmp_path: Path, name: str) -> None:
    """The bias of the choice and the router in float32; biases of experts; tensors of all experts."""
    family, shape = CASES[name]
    folder, saved = make_checkpoint(tmp_path / "made", family, **{**shape, **WIDE}), tmp_path / "saved"
    (prompt,) = random_prompts(VOCABULARY, (40,))
    options = {"quantization": "int4", "dtype": "bfloat16"}
    first = Model(folder, save_quantized=str(saved), **options).whole(prompt)
    assert torch.equal(Model(saved, dtype="bfloat16").whole(prompt), first)
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
async def test_through_both_services_with_a_draft_model(tmp_path: Path, family: str) -> None:
    """In small chunks, from a pool too small for all requests, with drafts of a mixture."""
    folder, draft = (make_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in range(2))
    blend(draft, folder, 0.05)
    reference, prompts = transformers_model(folder), random_prompts(VOCABULARY, (*LENGTHS, 90))
    outputs = await serve(folder, prompts, ignore_eos=True, speculative="draft", speculative_model=str(draft))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v2"])
async def test_an_executor_that_comes_back_costs_no_token(tmp_path: Path, family: str) -> None:
    """It goes away amid requests of all lengths, and another one takes its port."""
    folder = make_checkpoint(tmp_path, family)
    options: dict[str, Any] = {"num_gpu_blocks": 200, "max_num_seqs": 8, "num_threads": 1}
    prompts = random_prompts(VOCABULARY, LENGTHS)
    params = SamplingParams(max_tokens=150, temperature=0.8, seed=3, ignore_eos=True)
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        address = await first.enter_async_context(executor_service(folder, **options))
        running = await second.enter_async_context(scheduler_service(address, one_session=False))
        client = await second.enter_async_context(AsyncClient(running.target))
        expected = [output.outputs[0].token_ids for output in await client.generate(prompts, params)]
        streams = [client.stream(prompt, params) for prompt in prompts]
        found = [list((await anext(stream)).outputs[0].token_ids) for stream in streams]
        await first.aclose()
        async with executor_service(folder, listen=address, **options):

            async def rest(tokens: list[int], stream: Any) -> None:
                async for delta in stream:
                    for output in delta.outputs:
                        tokens += output.token_ids

            await asyncio.gather(*(rest(*each) for each in zip(found, streams, strict=True)))
            assert found == expected
            await running.wait_until_free()
            await second.aclose()
