"""Greedy tokens of the whole server against transformers' generate: fp32, 40 prompts of 1 to 300 tokens at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import AsyncClient, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT
from tests.helpers.services import cadenza_services

DEMO_MODEL = ROOT / "models" / "cadenza-demo"
MAX_TOKENS = 32
TIE = 1e-4

SHAPES: dict[str, dict[str, Any]] = {
    "mha, tied": {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 131},
    "gqa 2, odd head size": {"hidden_size": 36, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97},
    "gqa 4, head size 20": {"hidden_size": 80, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 333},
    "gqa 5": {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 1021},
    "llama 3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(11)
    lengths = [1, 2, 15, 16, 17, 300, *(rng.randint(1, 300) for _ in range(34))]
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def transformers_generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


def check_teacher_forced(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Where the tokens part, the two best logits must be within TIE of each other, and ours be one of them."""
    split = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if split is None:
        assert ours == theirs
        return
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + theirs[:split]])).logits[0, -1]
    best, second = torch.topk(logits, 2).values.tolist()
    assert best - second < TIE, f"token {split}: {ours[split]} instead of {theirs[split]}, logits {best} and {second}"
    assert best - float(logits[ours[split]]) < TIE


async def compare(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)
    expected = [transformers_generate(model, prompt) for prompt in prompts]
    options = {"max_num_seqs": 40, "max_num_batched_tokens": 512, "num_gpu_blocks": 1000}
    async with cadenza_services(folder, dtype="float32", **options) as running, AsyncClient(running.target) as client:
        outputs = await client.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        await running.wait_until_free()
    for prompt, output, theirs in zip(prompts, outputs, expected, strict=True):
        check_teacher_forced(model, prompt, output.outputs[0].token_ids, theirs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", short_and_long(SHAPES, ["mha, tied", "llama 3 rope"]))
async def test_tiny_checkpoints(tmp_path: Path, name: str) -> None:
    await compare(make_llama(tmp_path / "model", **SHAPES[name]))


async def test_demo_model() -> None:
    await compare(DEMO_MODEL)
