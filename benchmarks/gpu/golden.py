"""Greedy tokens of both services beside transformers, both on the GPU: pytest runs this file by its name.

Tiny random checkpoints take the whole path of a user's request. Without a GPU the same runs on the CPU, as a trial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import LLM, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.helpers.models.golden import random_prompts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW_TOKENS = 24
VOCAB = 523
PROMPTS = random_prompts(VOCAB, (1, 6, 40, 130))
"""The last two prompts take several steps of at most 64 tokens, while the others decode."""
_SERVED: dict[str, Any] = {
    "device": DEVICE,
    "num_gpu_blocks": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
}
_HEADS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3": {"head_dim": 128},
    "qwen2": {},
    "mistral": {"head_dim": 80},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {"head_dim": 64},
    "phi3": {"pad_token_id": 2},
    "granite": {},
    "gpt_neox": {},
    "opt": {},
    "falcon": {},
    "phi": {},
    "qwen3_moe": {},
    "gpt_oss": {"head_dim": 64},
    "glm4_moe": {},
}
_FLOAT_TOLERANCE = 1e-3
"""Share of the logits' scale."""
_ROUNDED_TOLERANCE = 8.0
"""Multiple of the root mean square change that rounding makes in transformers' own logits."""


def served(folder: Path, **options: Any) -> list[list[int]]:
    """The services' tokens for each prompt, all sent at once."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    with LLM(str(folder), skip_tokenizer_init=True, **{**_SERVED, **options}) as llm:
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
    return [list(each.outputs[0].token_ids) for each in outputs]


def logits_of(folder: Path, dtype: torch.dtype, texts: list[list[int]]) -> list[Tensor]:
    """transformers' logits [tokens, vocabulary] of each text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().to(DEVICE)
    with torch.no_grad():
        return [model(torch.tensor([text], device=DEVICE)).logits[0].float().cpu() for text in texts]


def shortfalls(folder: Path, tokens: list[list[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """For each prompt: the difference of the best logit and each token's logit, and all logits."""
    texts = [prompt + output for prompt, output in zip(PROMPTS, tokens, strict=True)]
    found, logits = [], logits_of(folder, torch.float32, texts)
    for prompt, output, each in zip(PROMPTS, tokens, logits, strict=True):
        rows = each[len(prompt) - 1 : -1]
        found.append(rows.max(-1).values - rows.gather(1, torch.tensor(output)[:, None])[:, 0])
    return found, logits


@pytest.mark.parametrize("family", _HEADS)
def test_tokens_are_those_of_transformers_in_fp32(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, vocab_size=VOCAB, **_HEADS[family])
    tokens = served(folder, dtype="float32", numerics="fast" if DEVICE == "cuda" else "auto")
    assert [len(each) for each in tokens] == [NEW_TOKENS] * len(PROMPTS)
    below, logits = shortfalls(folder, tokens)
    for each, rows in zip(below, logits, strict=True):
        assert float(each.max()) <= _FLOAT_TOLERANCE * float(rows.abs().max())


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="there is one GPU: two ranks need two")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_of_two_ranks_are_those_of_transformers_in_fp32(family: str, eager: bool, tmp_path: Path) -> None:
    """One process on each of two GPUs, joined by NCCL; inside CUDA graphs, too."""
    folder = make_checkpoint(tmp_path, family, vocab_size=VOCAB, **_HEADS[family])
    tokens = served(folder, dtype="float32", tensor_parallel_size=2, enforce_eager=eager)
    below, logits = shortfalls(folder, tokens)
    for each, rows in zip(below, logits, strict=True):
        assert float(each.max()) <= _FLOAT_TOLERANCE * float(rows.abs().max())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "gpt_neox"])
def test_tokens_in_bf16_differ_by_rounding_alone(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, vocab_size=VOCAB, dtype=torch.bfloat16, **_HEADS[family])
    tokens = served(folder, dtype="bfloat16", numerics="fast")
    below, exact = shortfalls(folder, tokens)
    texts = [prompt + output for prompt, output in zip(PROMPTS, tokens, strict=True)]
    for each, rows, rounded in zip(below, exact, logits_of(folder, torch.bfloat16, texts), strict=True):
        noise = float((rounded - rows).square().mean().sqrt())
        assert float(each.max()) <= _ROUNDED_TOLERANCE * noise
    assert torch.cat([each == 0 for each in below]).float().mean() > 0.7


@pytest.mark.skipif(DEVICE == "cpu", reason="8 bits are for GPUs")
@pytest.mark.parametrize(
    "option", ["quantization=int8", "quantization=fp8", "quantization=fp8_w8a8", "kv_cache_dtype=fp8"]
)
def test_tokens_with_8_bits_are_among_the_best(option: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 528}
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16, **{**_HEADS["llama"], **sizes})
    name, _, value = option.partition("=")
    tokens = served(folder, dtype="bfloat16", numerics="fast", **{name: value})
    below, logits = shortfalls(folder, tokens)
    for each, rows in zip(below, logits, strict=True):
        assert float(each.mean()) < 0.5 * float(rows.std())


def test_sampled_tokens_follow_from_the_seed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", vocab_size=VOCAB, dtype=torch.bfloat16, **_HEADS["llama"])
    params = SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    sampled = []
    with LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", **_SERVED) as llm:
        for prompts in (PROMPTS, PROMPTS[:1]):
            outputs = llm.generate([list(prompt) for prompt in prompts], params)
            sampled.append([list(each.outputs[0].token_ids) for each in outputs])
    assert all(0 <= token < VOCAB for each in sampled[0] for token in each)
    # Prompt and seed are the same; the batch changes only the last bits of the logits.
    assert sampled[0][0][:4] == sampled[1][0][:4]
