"""What is refused of an EAGLE-3 head: every message names --speculative-model and what is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.models.base import ModelConfigError
from executor_svc.models.folder import LoaderError
from executor_svc.models.heads.eagle3_spec import read_eagle3
from tests.checkpoints import edit_config, make_checkpoint, make_llama
from tests.executor_svc.driver import Model
from tests.executor_svc.models.heads.head_driver import load_head
from tests.executor_svc.models.model_configs import WRONG
from tests.helpers.models.eagle3_heads import Format, HeadShape, make_head

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_llama(tmp_path_factory.mktemp("target")), max_model_len=256)


def edit_inner(folder: Path, **fields: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    edit_config(folder, transformer_layer_config={**content["transformer_layer_config"], **fields})


def edit_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, of names with _ for each dot, or remove them."""
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        (key,) = [each for each in (*stored, name) if each.replace(".", "_") == name][:1]
        stored.pop(key, None)
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, folder / "model.safetensors")


def refused(folder: Path, target: Model, message: str) -> None:
    with pytest.raises(LoaderError, match=rf"^--speculative-model {folder}: .*{message}"):
        load_head(folder, target)


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported; supported: eagle3"),
    ({"speculators_model_type": None}, r"architectures is \['Eagle3Speculator'\]: no EAGLE-3 head"),
    ({"transformer_layer_config": None}, "transformer_layer_config must be an object"),
    ({"norm_before_residual": None}, "norm_before_residual is missing"),
    ({"norm_before_fc": True, "fc_norm": True}, "fc_norm is true, and so is norm_before_fc"),
    ({"norm_output": 1}, "norm_output must be true or false"),
    ({"draft_vocab_size": 132}, "draft_vocab_size must be at most vocab_size 131"),
    ({"draft_vocab_size": None}, "draft_vocab_size must be a positive integer"),
    ({"target_hidden_size": 48}, "made for a target of hidden size 48 .* is 40"),
    ({IDS: [0, 1, 3]}, f"{IDS} must be ascending numbers from 0 to the target's 2 layers"),
    ({IDS: [1, 0, 2]}, f"{IDS} must be ascending"),
    ({IDS: []}, f"{IDS} must be ascending"),
    ({IDS: None}, f"{IDS} is missing, and a target of 2 layers has no default"),
    ({IDS: [0, 1]}, r"tensor fc\.weight has shape \[40, 120\], config.json says \[40, 80\]"),
    ({"parallel_drafting": True}, "parallel_drafting is True: parallel drafting is not supported"),
    ({"use_aux_hidden_state": False}, "use_aux_hidden_state is false"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5; supported: 1"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIGS)
def test_fields(fields: dict[str, Any], message: str, target: Model, tmp_path: Path) -> None:
    edit_config(make_head(tmp_path, HeadShape()), **fields)
    refused(tmp_path, target, message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt_oss"}, "transformer_layer_config has model_type 'gpt_oss'; supported: llama, qwen3"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"vocab_size": 132}, "vocabulary has 132 ids .* 131: a draft must have the target's vocabulary"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window must be a positive integer"),
        ({"num_hidden_layers": 2}, r"tensor layers\.1\.\S+ is missing"),
        ({"hidden_size": 48}, r"tensor fc\.weight has shape \[40, 120\], config.json says \[48, 120\]"),
    ],
)
def test_fields_of_the_decoder(fields: dict[str, Any], message: str, target: Model, tmp_path: Path) -> None:
    edit_inner(make_head(tmp_path, HeadShape()), **fields)
    refused(tmp_path, target, message)


def test_fields_of_older_checkpoints(target: Model, tmp_path: Path) -> None:
    folder = make_head(tmp_path, HeadShape("old"))
    ids = json.loads((folder / "config.json").read_text())[IDS]
    edit_config(folder, eagle_config={IDS: ids, "use_aux_hidden_state": False}, **{IDS: None})
    refused(folder, target, r"eagle_config\.use_aux_hidden_state is false")
    edit_config(folder, eagle_config={IDS: ids})
    assert load_head(folder, target).model.state_layers == (0, 1, 2)
    edit_config(folder, architectures=["LlamaForCausalLM"])
    refused(folder, target, "no EAGLE-3 head. Supported: LlamaForCausalLMEagle3")


def test_default_layers(tmp_path: Path) -> None:
    """vLLM's: 2, the middle one, and the third from the end."""
    deep = Model(make_llama(tmp_path / "target", num_hidden_layers=9), max_model_len=256)
    edit_config(make_head(tmp_path / "head", HeadShape("old")), **{IDS: None})
    assert load_head(tmp_path / "head", deep).model.state_layers == (2, 4, 6)


TENSORS: list[tuple[HeadShape, dict[str, torch.Tensor | None], str]] = [
    (HeadShape(), {"fc_weight": None}, r"tensor fc\.weight is missing"),
    (HeadShape(), {"lm_head_weight": None}, r"tensor lm_head\.weight is missing"),
    (HeadShape(), {"d2t": None}, "tensor d2t is missing"),
    (HeadShape(), {"d2t": torch.zeros(49, dtype=torch.int64)}, r"tensor d2t is I64 \[49\], .* I64 \[50\]"),
    (HeadShape(), {"d2t": torch.zeros(50)}, r"tensor d2t is F32 \[50\]"),
    (HeadShape(), {"d2t": torch.full((50,), 82)}, "tensor d2t does not map to 50 different ids below 131"),
    (HeadShape(), {"d2t": -torch.arange(50)}, "tensor d2t does not map to 50 different ids"),
    (HeadShape(), {"d2t": torch.full((50,), -1)}, "tensor d2t does not map to 50 different ids"),
    (HeadShape(), {"layers_0_hidden_norm_weight": None}, r"tensor layers\.0\.hidden_norm\.weight is missing"),
    (HeadShape(), {"layers_0_self_attn_q_proj_weight": torch.ones(48, 40)}, r"\[48, 40\], config.json says \[48, 80\]"),
    (HeadShape("old"), {"midlayer_input_layernorm_weight": None}, r"midlayer\.input_layernorm\.weight is missing"),
    (HeadShape("old"), {"midlayer_mlp_up_proj_weight": None}, r"tensor midlayer\.mlp\.up_proj\.weight is missing"),
    (HeadShape(flags={"fc_norm": True}), {"fc_norm_2_weight": None}, r"tensor fc_norm\.2\.weight is missing"),
    (HeadShape(flags={"norm_before_fc": True}), {"input_norm_weight": None}, r"tensor input_norm\.weight is missing"),
    (HeadShape(), {"mask_hidden": torch.ones(1, 120)}, "1 tensors that the model does not use: mask_hidden"),
    (
        HeadShape(decoder={"hidden_size": 48}),
        {"embed_tokens_weight": None},
        r"tensor embed_tokens\.weight is missing",
    ),
]


@pytest.mark.parametrize(("shape", "tensors", "message"), TENSORS)
def test_tensors(
    shape: HeadShape, tensors: dict[str, torch.Tensor | None], message: str, target: Model, tmp_path: Path
) -> None:
    edit_tensors(make_head(tmp_path, shape), **tensors)
    refused(tmp_path, target, message)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "not a readable safetensors file"),
    ],
)
def test_files(spoil: Callable[[Path], Any], message: str, target: Model, tmp_path: Path) -> None:
    spoil(make_head(tmp_path, HeadShape()))
    refused(tmp_path, target, message)


def test_missing(target: Model, tmp_path: Path) -> None:
    refused(tmp_path / "nothing", target, "no such folder")


def test_names_with_a_prefix_are_read(target: Model, tmp_path: Path) -> None:
    """Some tools save `model.` before all names but the head's and the map's."""
    plain = load_head(make_head(tmp_path, HeadShape()), target).num_parameters
    stored = load_file(tmp_path / "model.safetensors")
    kept = ("lm_head", "d2t", "t2d")
    renamed = {name if name.startswith(kept) else f"model.{name}": tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert load_head(tmp_path, target).num_parameters == plain


def test_target_through_transformers(tmp_path: Path) -> None:
    hosted = Model(make_checkpoint(tmp_path / "target", "gptj"), max_model_len=256)
    refused(make_head(tmp_path / "head", HeadShape()), hosted, "needs a target with code in Cadenza")


def test_shorter_context_is_a_warning(target: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_inner(make_head(tmp_path, HeadShape()), max_position_embeddings=64)
    with caplog.at_level(logging.WARNING):
        assert load_head(tmp_path, target).context_limit == 64
    assert "was made for 64 positions, --max-model-len is 256" in caplog.text


@pytest.mark.parametrize("layout", ["new", "old"])
def test_any_value_of_any_field_is_read_or_refused_in_one_line(layout: Format) -> None:
    content = HeadShape(layout).config
    inner = content.get("transformer_layer_config", {})
    tries = [content | {name: value} for name in content for value in WRONG]
    tries += [content | {"transformer_layer_config": inner | {name: value}} for name in inner for value in WRONG]
    messages = []
    for fields in tries:
        try:
            read_eagle3(fields, 2)
        except (ModelConfigError, LoaderError) as error:
            messages.append(str(error))
    assert len(messages) > len(tries) / 2
    for message in messages:
        assert len(message) < 600
        assert message.isprintable()
