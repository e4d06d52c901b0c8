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
from executor_svc.models.folder import LoaderError
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
from tests.helpers.services import executor_service, scheduler_service

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MIXTURES},
    "deepseek_v3 of halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None, "n_shared_experts": 2}),
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["gptq", "awq", "w4a16", "fp8 in blocks", "mxfp4"])
def test_experts_in_few_bits(tmp_path: Path, layout: str) -> None:
    """Greedy tokens are those of transformers on the dequantized weights."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    folder = make_checkpoint(tmp_path / "made", "qwen3_moe", **shape)
    quantized, dense = tmp_path / "quantized", tmp_path / "dense"
    quantize_checkpoint(folder, layout, quantized, dense)
    check_greedy(quantized, dense, dtype="float32", quantized_activations="off")


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Blocks and scales of all experts in one tensor each, as the released models have them."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    dense = make_checkpoint(tmp_path / "dense", "gpt_oss", **shape)
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
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    save_file(few_bits, quantized / "model.safetensors", {"format": "pt"})
    (quantized / "config.json").write_bytes((dense / "config.json").read_bytes())
    edit_config(quantized, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    check_greedy(quantized, dense, dtype="float32", quantized_activations="off")


def test_experts_with_columns_in_orders_of_their_own_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    folder = make_checkpoint(tmp_path / "made", "qwen3_moe", **shape)
    quantize_checkpoint(folder, "gptq with desc_act", tmp_path / "quantized", tmp_path / "dense")
    with pytest.raises(LoaderError, match=r"experts\.0\.gate_proj and others: columns of experts in another order"):
        Model(tmp_path / "quantized")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_experts_rounded_at_load(tmp_path: Path, bits: str) -> None:
    folder = make_checkpoint(tmp_path, "mixtral", hidden_size=64, intermediate_size=64, head_dim=16)
    rounded = Model(folder, quantization=bits, quantized_activations="off", dtype="bfloat16")
    check_bits_of_chunks(rounded)
    assert rounded.device.few_bits.forms


@pytest.mark.slow
async def test_through_both_services_with_a_draft_model(tmp_path: Path) -> None:
    """In small chunks, from a pool too small for all requests, with drafts of a mixture."""
    folder, draft = (make_checkpoint(tmp_path / str(seed), "qwen3_moe", seed=seed) for seed in range(2))
    blend(draft, folder, 0.05)
    reference, prompts = transformers_model(folder), random_prompts(VOCABULARY, (*LENGTHS, 90))
    outputs = await serve(folder, prompts, ignore_eos=True, speculative="draft", speculative_model=str(draft))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(reference, prompt, NEW_TOKENS).tokens


@pytest.mark.slow
async def test_an_executor_that_comes_back_costs_no_token(tmp_path: Path) -> None:
    """It goes away amid requests of all lengths, and another one takes its port."""
    folder = make_checkpoint(tmp_path, "glm4_moe")
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
