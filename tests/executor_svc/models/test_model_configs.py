"""What is read from config.json: older forms, and limits on lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.executor_svc.models.model_configs import LLAMA3, LONG, SIZES, read

# Family, what a current transformers writes, what an older one wrote for the same model.
OLDER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
    ("mistral", {"sliding_window": 4096, "head_dim": 12}, {"rope_theta": 10000.0}),
    (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4,
        },
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "use_sliding_window": False,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    ("qwen3", {"head_dim": 128, "layer_types": ["full_attention"] * 6}, {"sliding_window": None}),
    (
        "gemma2",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {"hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0, "rope_scaling": None},
    ),
    (
        "gemma3_text",
        {
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
            },
        },
        {
            "sliding_window_pattern": 3,
            "rope_theta": 2e6,
            "rope_local_base_freq": 9000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {},
    ),
    (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
                **LONG,
                "original_max_position_embeddings": 64,
            },
        },
        {"original_max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **LONG}},
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    ("granite", {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"rope_theta": 7e4}),
]


@pytest.mark.parametrize(("family", "new", "old"), OLDER, ids=[f"{i}-{row[0]}" for i, row in enumerate(OLDER)])
def test_older_forms_describe_the_same_model(family: str, new: dict[str, Any], old: dict[str, Any]) -> None:
    """To us, and to transformers."""
    from transformers import AutoConfig

    assert read(family, **old) == read(family, **new)
    theirs_old, theirs_new = (
        AutoConfig.for_model(family, pad_token_id=None, **SIZES, **fields).to_dict() for fields in (old, new)
    )
    for name in ("layer_types", "rope_parameters", "tie_word_embeddings", "head_dim"):
        assert _without_type(theirs_old.get(name)) == _without_type(theirs_new.get(name)), name
    saved = {name: value for name, value in theirs_new.items() if name not in ("architectures", "model_type")}
    assert read(family, **saved) == read(family, **new), "what transformers writes today"


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_names_that_phi3_had_for_longrope(name: str) -> None:
    forms = [{"rope_scaling": {"type": kind, **LONG}} for kind in (name, "longrope")]
    assert read("phi3", **forms[0]) == read("phi3", **forms[1])


def _without_type(value: Any) -> Any:
    """Transformers keeps the older name of rope_type beside the new one."""
    return {name: entry for name, entry in value.items() if name != "type"} if isinstance(value, dict) else value


LIMITS: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 256),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, 640),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 1024),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1024),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}}, 400),
    ("llama", {"rope_scaling": {"type": "llama3", **LLAMA3}}, 256),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 64}, 256),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 256),
    ("mistral", {"sliding_window": 32}, 256),
    ("mimo", {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 6}, 256),
]


@pytest.mark.parametrize(("family", "fields", "limit"), LIMITS)
def test_context_limit(family: str, fields: dict[str, Any], limit: int) -> None:
    assert read(family, **fields).context_limit == limit


def test_mimo_is_qwen2_with_a_head() -> None:
    for fields in ({}, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}):
        spec, plain = read("mimo", num_nextn_predict_layers=1, **fields), read("qwen2", **fields)
        assert replace(spec, num_mtp_layers=0) == plain
        assert spec.num_mtp_layers == 1
        assert spec.digest(256) == plain.digest(256), "a head says nothing of what the model computes"
    assert read("mimo").num_mtp_layers == read("mimo", num_nextn_predict_layers=0).num_mtp_layers == 0


def test_whose_heads_are_known() -> None:
    """The published config.json of Qwen3-Next names none; layers of Kimi Linear's are left alone."""
    assert read("qwen3_next_delta").num_mtp_layers == read("qwen3_5_delta", mtp_num_hidden_layers=1).num_mtp_layers == 1
    assert read("qwen3_5_delta").num_mtp_layers == 0
    assert read("kimi_linear", num_nextn_predict_layers=2).ignored == ("model.layers.6.", "model.layers.7.")
