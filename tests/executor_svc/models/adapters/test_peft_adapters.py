"""Adapters that peft made: what is read of them gives the weights that peft merges, of each family."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from executor_svc.models.adapters.reading import AdapterError
from tests.checkpoints import FAMILIES, make_checkpoint
from tests.helpers.marks import short_and_long
from tests.helpers.models.peft_adapters import (
    adapted_head,
    adapted_linear,
    adapted_table,
    base_tensors,
    linears_of,
    read,
    save_peft_adapter,
    spec_of,
)

INTO_ATTENTION = r".*\.(q|k|v|qkv)_proj"

KINDS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"},
    "rank 1": {"r": 1, "target_modules": ["o_proj", "v_proj", "qkv_proj"]},
    "rank 64": {"r": 64, "lora_alpha": 3, "target_modules": ["down_proj", "up_proj", "gate_up_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": "all-linear",
        "rank_pattern": {
            "down_proj": 3,
            "model.layers.1.self_attn.o_proj": 6,
            r"layers\.0\.mlp\.\w+": 2,
            "mlp.up.proj": 7,
        },
        "alpha_pattern": {r"layers\.(1|3)\..*": 40, "self_attn.o_proj": 0.5, "proj": 9},
    },
    "rslora": {
        "r": 9,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 2},
        "target_modules": INTO_ATTENTION + r"|.*\.o_proj",
    },
    "regex": {"r": 2, "target_modules": INTO_ATTENTION + r"|model\.layers\.\d\.mlp\.down_proj"},
    "a layer": {"r": 2, "target_modules": ["o_proj", "model.layers.0.mlp.down_proj"], "layers_to_transform": 1},
    "layers by pattern": {
        "r": 2,
        "target_modules": ["o_proj", "down_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["h", "lay.rs"],
    },
    "all layers by pattern": {"r": 2, "target_modules": ["o_proj"], "layers_to_transform": [], "layers_pattern": "h"},
    "excluded": {"r": 2, "target_modules": "all-linear", "exclude_modules": ["layers.0.mlp.down_proj", "o_proj"]},
    "excluded by pattern": {"r": 2, "target_modules": "all-linear", "exclude_modules": r".*\.1\.mlp\..*"},
    "orthogonal": {"r": 4, "target_modules": ["o_proj"], "init_lora_weights": "orthogonal", "fan_in_fan_out": True},
}


IN_ALL_FAMILIES = ["all", "rank 64", "patterns", "rslora"]
CASES = [
    (family, kind) for family in FAMILIES for kind in KINDS if kind in IN_ALL_FAMILIES or family in ("llama", "phi3")
]
SHORT = [
    (family, kind)
    for family, kind in CASES
    if family == "llama" or kind in (["rank 1", "all", "patterns", "regex"] if family == "phi3" else ["all", "rslora"])
]
"""Of phi3, whose linears are fused in the checkpoint, those that choose among them."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the tiny checkpoint of a family."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), short_and_long(CASES, SHORT))
def test_the_weights_are_those_that_peft_merges(
    checkpoint: Callable[[str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    base = checkpoint(family)
    merged = save_peft_adapter(base, tmp_path, **KINDS[kind]).merge_and_unload().state_dict()
    num_layers = spec_of(base).num_layers
    before, after = (linears_of(tensors, num_layers) for tensors in (base_tensors(base), merged))
    adapter = read(base, tmp_path)
    assert len(after) == 4 * num_layers
    for use, weight in before.items():
        changed = bool((after[use] != weight).any())
        assert (use in adapter.linears) == changed, use
        assert_close(adapted_linear(adapter, use, weight), after[use])
    assert adapter.linears.keys() <= before.keys()
    assert adapter.embedding is adapter.embedding_rows is adapter.head_rows is None


TABLES: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "head": {"target_modules": ["lm_head"], "use_rslora": True},
    "both": {
        "target_modules": ["lm_head", "embed_tokens"],
        "rank_pattern": {"lm_head": 3},
        "alpha_pattern": {"embed_.*": 1},
    },
    "both, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"target_modules": ["o_proj"], "trainable_token_indices": [7, 130, 3]},
    "tokens of both": {
        "target_modules": ["o_proj"],
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [4]},
    },
    "tokens, and a pair of the head": {"target_modules": ["o_proj", "lm_head"], "trainable_token_indices": [7, 3]},
    "the same tokens": {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [3], "lm_head": [3]}},
    "tokens of the head": {"target_modules": ["o_proj"], "trainable_token_indices": {"lm_head": [9, 2]}},
    "whole embedding": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"]},
    "whole head": {"target_modules": ["o_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    "whole embedding, tied": {
        "target_modules": "all-linear",
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"), [*product(["llama", "qwen3"], TABLES), ("gemma2", "embedding"), ("gemma3_text", "tokens")]
)
def test_embeddings_and_head_are_those_of_pefts_unmerged_model(
    checkpoint: Callable[[str], Path], family: str, kind: str, tmp_path: Path
) -> None:
    """Unmerged, as peft merges both into the one table of a tied model. Qwen3's and Gemma's are tied."""
    base = checkpoint(family)
    model = save_peft_adapter(base, tmp_path, **{"r": 5, "lora_alpha": 7, **TABLES[kind]}).get_base_model()
    spec, tensors = spec_of(base), base_tensors(base)
    hidden = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    adapter = read(base, tmp_path)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.arange(spec.vocab_size))
        logits = model.get_output_embeddings()(hidden)
    scale = float(embedded[0, 0] / adapted_table(adapter, tensors["model.embed_tokens.weight"])[0, 0])
    assert scale == pytest.approx(spec.embedding_scale, rel=1e-6)
    assert_close(adapted_table(adapter, tensors["model.embed_tokens.weight"]) * scale, embedded)
    assert_close(hidden @ adapted_head(adapter, tensors["lm_head.weight"]).t(), logits)
    about_head = {
        "head",
        "tokens, and a pair of the head",
        "both",
        "tokens of the head",
        "tokens of both",
        "the same tokens",
        "whole head",
    }
    if spec.tied:
        about_head |= {"both, tied", "tokens", "whole embedding, tied"}
    assert ((None, "lm_head") in adapter.linears or adapter.head_rows is not None) == (kind in about_head)


@pytest.mark.parametrize(
    ("init", "changes"),
    [
        *((init, False) for init in (True, False, "gaussian", "eva", "orthogonal", "mica")),
        *((init, True) for init in ("pissa", "pissa_niter_2", "olora")),
    ],
)
def test_the_inits_that_are_refused_are_those_that_change_the_base(
    checkpoint: Callable[[str], Path], init: bool | str, changes: bool, tmp_path: Path
) -> None:
    base = checkpoint("llama")
    model = save_peft_adapter(base, tmp_path, r=4, target_modules=["q_proj"], init_lora_weights=init)
    name = "model.layers.0.self_attn.q_proj"
    weight = model.get_base_model().get_submodule(name).base_layer.weight
    assert torch.equal(weight, base_tensors(base)[f"{name}.weight"]) == (not changes)
    if changes:
        with pytest.raises(AdapterError, match=f"init_lora_weights is '{init}': such an adapter changes"):
            read(base, tmp_path)
    else:
        assert len(read(base, tmp_path).linears) == 2


def test_an_adapter_that_peft_makes_of_pissa_is_exact(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base, config = checkpoint("llama"), {"r": 3, "target_modules": ["q_proj"]}
    model = save_peft_adapter(base, tmp_path / "converted", init_lora_weights="pissa", from_start=True, **config)
    merged = linears_of(model.merge_and_unload().state_dict(), 2)
    adapter = read(base, tmp_path / "converted")
    assert adapter.max_rank == 2 * 3
    for use, weight in linears_of(base_tensors(base), 2).items():
        assert_close(adapted_linear(adapter, use, weight), merged[use])
