"""Our Llama against transformers: greedy continuations token by token in fp32, and logits in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import edit_config, make_llama
from tests.executor_svc.driver import Model
from tests.helpers.models.golden import (
    check_bfloat16,
    compare,
    our_greedy,
    random_prompts,
    transformers_greedy,
    transformers_model,
)

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
CLOSE = 2e-5


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("golden"), **CHECKPOINTS[request.param])


@pytest.mark.sampled(2)
def test_greedy_equals_transformers(checkpoint: Path) -> None:
    reference, model = transformers_model(checkpoint), Model(checkpoint)
    prompts = random_prompts(model.loaded.geometry.vocab_size, PROMPT_LENGTHS)
    equal = 0
    for prompt, ours in zip(prompts, our_greedy(model, prompts, NEW_TOKENS), strict=True):
        equal += compare(ours, transformers_greedy(reference, prompt, NEW_TOKENS), CLOSE)
    assert equal > 0.8 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"


@pytest.mark.sampled(4)
def test_bfloat16_is_close(checkpoint: Path) -> None:
    check_bfloat16(checkpoint, random_prompts(90, PROMPT_LENGTHS)[-1])


def test_config_of_older_transformers(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` beside each other, `torch_dtype`: the same bits as the new form."""
    folder = make_llama(tmp_path, rope_parameters=LLAMA3_ROPE)
    tokens = random_prompts(131, PROMPT_LENGTHS)[-1]
    new = Model(folder).whole(tokens)
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(
        folder, rope_parameters=None, dtype=None, rope_theta=5000.0, rope_scaling=scaling, torch_dtype="float32"
    )
    assert torch.equal(Model(folder).whole(tokens), new)
    edit_config(folder, rope_scaling={**scaling, "factor": 2.0})
    assert not torch.equal(Model(folder).whole(tokens), new)
