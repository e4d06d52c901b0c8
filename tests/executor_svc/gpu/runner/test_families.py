"""Every family of models on the GPU's kernels: the tokens of the CPU's path, through a chunk and decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, MIXTURES, NEWER, make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.executor.plans import scheduled, sequence
from tests.helpers.executor.stepping import Stepper
from tests.helpers.marks import short_and_long

pytestmark = pytest.mark.slow

HOSTED = "codegen", "gptj"

SEVERAL_LAYERS = "gemma2", "gemma3_text", "llama", "qwen2"
"""Those whose layers differ, and a plain one; of the others one layer is as good as two."""

SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
SHORT = "gpt2", "apertus", "cohere2", "gemma4_text", "olmo2", "qwen3_moe", "gpt_oss", "glm4_moe"

FEWEST_LAYERS = {
    "gemma4_text": {"num_hidden_layers": 4, "layer_types": SLIDING_AND_FULL * 2, "num_kv_shared_layers": 2},
    "llama4_text": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "ernie4_5_moe": {"num_hidden_layers": 2, "moe_layer_end_index": 1},
    "glm4_moe": {"num_hidden_layers": 2},
    "gpt_oss": {"num_hidden_layers": 2},
    "qwen2_moe": {"num_hidden_layers": 2, "mlp_only_layers": [1]},
}
"""Of families that need more than two for all of their parts, or say so layer by layer."""

OF_LISTS = "granite_swa", "granitemoe_swa", "qwen3_next"
"""Those whose fields name each layer."""

PROMPT = list(range(3, 31))
"""Longer than the windows of those that have one."""


def tokens_of(model: Model) -> list[list[int]]:
    """Tokens of each step: a prompt in two chunks, another beside the second, then a decode of both."""
    stepper = Stepper(model, num_slots=2)
    first, second = sequence(0, PROMPT, stepper.blocks(0)), sequence(1, [5, 9, 2], stepper.blocks(1))
    results = [
        stepper.step(admitted=(first,), scheduled=scheduled((0, 16, False))),
        stepper.step(admitted=(second,), scheduled=scheduled((0, 12, True), (1, 3, True))),
        stepper.step(decode_ready=True),
    ]
    return [result.token_ids.tolist() for result in results]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", short_and_long([*FAMILIES, *NEWER, *MIXTURES, *HOSTED], [*SEVERAL_LAYERS, *SHORT]))
def test_tokens_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    """Heads are of sizes that attention is not made for, and filled up."""
    shape = FEWEST_LAYERS.get(family, {"num_hidden_layers": 2 if family in (*SEVERAL_LAYERS, *NEWER) else 1})
    shape = {} if family in OF_LISTS else shape
    folder = make_checkpoint(tmp_path, family, **shape)
    expected = tokens_of(Model(folder))
    assert [len(step) for step in expected] == [0, 2, 2]
    assert tokens_of(Model(folder, device="cuda")) == expected


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}),
        ("llama4_text", {"moe_layers": [0, 1], "num_local_experts": 4, "intermediate_size": 32}),
    ],
)
def test_families_that_may_have_experts(family: str, shape: dict[str, Any], tmp_path: Path) -> None:
    """Beside an MLP; and of one choice, whose weight multiplies what the expert reads."""
    folder = make_checkpoint(tmp_path, family, **FEWEST_LAYERS[family] | shape)
    assert tokens_of(Model(folder, device="cuda")) == tokens_of(Model(folder))
