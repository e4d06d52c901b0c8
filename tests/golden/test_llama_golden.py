"""Our Llama against transformers: greedy continuations token by token in fp32, and logits in bf16."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import edit_config, make_llama
from tests.kernels.driver import Model, Tokens

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "head size 10": {},
    "head size 20, group 4, tied": {
        "hidden_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 97,
    },
    "head size 36, no groups, biases": {
        "hidden_size": 72,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "group 5, llama3 rope": {
        "hidden_size": 80,
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "rope_parameters": LLAMA3_ROPE,
    },
    "linear rope, odd vocabulary": {
        "vocab_size": 203,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "head_dim given, sharded": {"head_dim": 32, "hidden_size": 60, "shards": True},
    "one layer, head size 64, untied": {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1},
}
PROMPT_LENGTHS = (1, 3, 17, 64, 90)
NEW_TOKENS = 24
CLOSE = 1e-4


def prompts(vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, vocabulary) for _ in range(length)] for length in PROMPT_LENGTHS]


def transformers_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def teacher_forced(reference: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def transformers_greedy(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


def our_greedy(model: Model, texts: list[list[int]]) -> list[Tokens]:
    """Continue all prompts at once: chunks of at most 20 prompt tokens, late comers, decodes beside prefills."""
    driver = model.driver(block_size=8)
    sequences = [Tokens(list(text)) for text in texts]
    wanted = [len(text) + NEW_TOKENS for text in texts]
    step = 0
    while any(len(s.tokens) < end for s, end in zip(sequences, wanted, strict=True)):
        present = [(i, s) for i, s in enumerate(sequences) if i <= step and len(s.tokens) < wanted[i]]
        work = [(s, min(20, len(s.tokens) - s.num_computed)) for _, s in present]
        for (s, _), rows in zip(work, driver.step(work, "last"), strict=True):
            if s.num_computed == len(s.tokens):
                s.tokens.append(int(rows[-1].argmax()))
        step += 1
    return sequences


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("golden"), **CHECKPOINTS[request.param])


def test_greedy_equals_transformers(checkpoint: Path) -> None:
    reference, model = transformers_model(checkpoint), Model(checkpoint)
    texts = prompts(model.loaded.geometry.vocab_size)
    compared = 0
    for prompt, ours in zip(texts, our_greedy(model, texts), strict=True):
        theirs = transformers_greedy(reference, prompt)
        found = ours.tokens[len(prompt) :]
        logits = teacher_forced(reference, ours.tokens)
        torch.testing.assert_close(model.whole(ours.tokens), logits, rtol=0, atol=5e-4)
        for i, (mine, other) in enumerate(zip(found, theirs, strict=True)):
            best = logits[len(prompt) + i - 1].topk(2).values
            if mine != other:
                assert best[0] - best[1] < CLOSE, (len(prompt), i, mine, other)
                break  # a tie: from here on the texts differ, and their logits were compared above
            compared += 1
    assert compared > 0.8 * NEW_TOKENS * len(texts), "too few tokens were compared to prove anything"


def test_bfloat16_is_close(checkpoint: Path) -> None:
    """Our bf16 logits differ from transformers' fp32 ones by no more than its own bf16 logits do, or little more."""
    exact, rounded = transformers_model(checkpoint), transformers_model(checkpoint, torch.bfloat16)
    model = Model(checkpoint, dtype="bfloat16")
    tokens = prompts(model.loaded.geometry.vocab_size)[-1]
    wanted = teacher_forced(exact, tokens)
    theirs, ours = teacher_forced(rounded, tokens), model.whole(tokens)
    their_error, our_error = (theirs - wanted).square().mean().sqrt(), (ours - wanted).square().mean().sqrt()
    assert our_error <= 1.25 * their_error + 1e-3, (our_error, their_error)
    assert our_error < 0.1 * wanted.std()


def test_config_of_older_transformers(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside each other, `torch_dtype`: the same bits as the new form."""
    folder = make_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    tokens = prompts(131)[-1]
    new = Model(folder).whole(tokens)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(
        folder, rope_parameters=None, dtype=None, rope_theta=5000.0, rope_scaling=scaling, torch_dtype="float32"
    )
    assert torch.equal(Model(folder).whole(tokens), new)
    edit_config(folder, rope_scaling={**scaling, "factor": 2.0})
    assert not torch.equal(Model(folder).whole(tokens), new)
