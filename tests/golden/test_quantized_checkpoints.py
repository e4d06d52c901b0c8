"""Checkpoints in few bits against transformers on the same numbers, dense: greedy tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, NEWER, edit_config, make_checkpoint
from tests.executor_svc.driver import Model
from tests.helpers.marks import short_and_long
from tests.helpers.models.golden import compare_greedy, our_greedy, random_prompts, transformers_model
from tests.helpers.models.quantized_layouts import LAYOUTS, quantize_checkpoint

NEW_TOKENS = 8
CLOSE = 2e-5
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Columns in whole groups."""
OF_FAMILIES = {"mistral": "gptq with desc_act", "qwen2": "awq", "qwen3": "w4a16 with zero points", "gemma2": "fp8"}
NEWER_FAMILIES = [
    ("cohere2", "gptq with desc_act"),
    ("glm4", "w4a16"),
    ("granitemoehybrid", "w4a16"),
    ("apertus", "fp8"),
    ("gpt_neox", "gptq with desc_act"),
    ("falcon", "w4a16"),
    ("qwen3_5_text", "gptq with desc_act"),
]
"""Those with layers and names unlike those of all others."""
"""One layout each; the families that are not named: w4a16."""
CASES = (
    [*(("llama", layout) for layout in LAYOUTS)]
    + [(family, OF_FAMILIES.get(family, "w4a16")) for family in FAMILIES if family != "llama"]
    + NEWER_FAMILIES
)
SHORT = [
    (family, layout)
    for family, layout in CASES
    if family in ("llama", "qwen2", "gemma2", "phi3", "glm4", "qwen3_5_text")
]


def make(folder: Path, family: str, layout: str) -> tuple[Path, Path]:
    """Return a tiny checkpoint in few bits, and the same numbers dense."""
    shape = SHAPE | ({"head_dim": 16} if "head_dim" in {**FAMILIES, **NEWER}[family] else {})
    shape |= {"shared_intermediate_size": 96, "mamba_d_head": 16} if family == "granitemoehybrid" else {}
    made = make_checkpoint(folder / "made", family, **shape)
    quantize_checkpoint(made, layout, folder / "quantized", folder / "dense")
    return folder / "quantized", folder / "dense"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("family", "layout"), short_and_long(CASES, SHORT))
def test_greedy_equals_transformers_on_the_dequantized_weights(tmp_path: Path, family: str, layout: str) -> None:
    quantized, dense = make(tmp_path, family, layout)
    prompts = random_prompts(131, (3, 40))
    reference, equal = transformers_model(dense), 0
    for prompt, ours in zip(
        prompts, our_greedy(Model(quantized, quantized_activations="off"), prompts, NEW_TOKENS), strict=True
    ):
        equal += compare_greedy(ours, reference, prompt, CLOSE)
    assert equal > 0.9 * NEW_TOKENS * len(prompts), "too few tokens were compared to prove anything"


def test_the_format_is_part_of_the_digest(tmp_path: Path) -> None:
    """The same bytes as versions 1 and 2 of GPTQ are two models."""
    quantized, _ = make(tmp_path, "llama", "gptq")
    first = Model(quantized).loaded.weights_digest
    config = LAYOUTS["gptq"][0]
    edit_config(quantized, quantization_config=config | {"desc_act": True})
    assert Model(quantized).loaded.weights_digest == first
    edit_config(quantized, quantization_config=config | {"checkpoint_format": "gptq_v2"})
    assert Model(quantized).loaded.weights_digest != first
