"""Fields that a config.json leaves out have the values that transformers takes for them, in each native family."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from executor_svc.models.registry import ARCHITECTURES, own_architecture
from executor_svc.models.specs.spec import DecoderSpec
from tests.checkpoint_shapes import FAMILIES, NEWER
from tests.mixture_shapes import MIXTURES
from tests.recurrent_shapes import MODEL_TYPES, RECURRENT

_TYPES = sorted({MODEL_TYPES.get(name, name) for name in (*FAMILIES, *NEWER, *MIXTURES, *RECURRENT)})
_GIVEN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "gemma4_text": {"per_layer_config": {f"{layer:02}": {"head_dim": 512} for layer in range(5, 30, 6)}},
}
"""What must be there: without it transformers' model has another form, or none that could be."""
_SIZES = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
    "n_embd", "n_head", "n_layer",
}  # fmt: skip
_OTHERS = {
    "id2label", "label2id", "model_type", "transformers_version",
    "time_step_limit",  # infinite, which transformers reads otherwise than it writes
}  # fmt: skip


def _read(model_type: str, content: dict[str, Any]) -> DecoderSpec:
    name = own_architecture([], model_type)
    assert name is not None
    return ARCHITECTURES[name](content)


def _defaults(model_type: str, **given: Any) -> dict[str, Any]:
    from transformers import AutoConfig

    text = AutoConfig.for_model(model_type, **given).to_json_string(use_diff=False)
    return {name: value for name, value in json.loads(text).items() if name not in _OTHERS}


@pytest.mark.parametrize("model_type", _TYPES)
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    given = _GIVEN.get(model_type, {})
    whole = _defaults(model_type, **given)
    wanted = _read(model_type, whole)
    for name in whole.keys() - _SIZES - given.keys():
        without = {key: value for key, value in whole.items() if key != name}
        assert _read(model_type, without) == wanted, name


_SLIDING = {"rope_type": "default", "rope_theta": 300.0}
_FORMS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("apertus", {"rope_theta": 777.0}, ("rope_parameters",)),
    ("gpt_oss", {"rope_theta": 777.0}, ("rope_parameters",)),
    ("mixtral", {"rope_theta": 777.0}, ("rope_parameters",)),
    ("mixtral", {"num_attention_heads": 40, "hidden_size": 640}, ("num_key_value_heads",)),
    ("ernie4_5", {"head_dim": None}, ()),
    ("lfm3", {"rope_parameters": {"sliding_attention": _SLIDING, "full_attention": {"rope_type": "default"}}}, ()),
    (
        "qwen2_moe",
        {"num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 4},
        ("layer_types",),
    ),
]
"""A family, its fields, and what is absent beside them."""


@pytest.mark.parametrize(("model_type", "fields", "absent"), _FORMS, ids=[row[0] for row in _FORMS])
def test_forms_mean_what_transformers_reads(model_type: str, fields: dict[str, Any], absent: tuple[str, ...]) -> None:
    parsed = _defaults(model_type, **copy.deepcopy(fields))
    raw = {name: value for name, value in parsed.items() if name not in absent} | fields
    assert raw != parsed
    assert _read(model_type, raw) == _read(model_type, parsed)


def test_layers_of_gemma_4_are_named_by_as_many_digits_as_the_last_one() -> None:
    whole = _defaults("gemma4_text", num_hidden_layers=12, global_head_dim=64)
    assert list(whole["per_layer_config"]) == ["05", "11"]
    sizes = [layer.sizes for layer in _read("gemma4_text", whole).layers]
    assert [each.head_size for each in sizes if each] == [256] * 5 + [64] + [256] * 5 + [64]
