"""The structure of an EAGLE-3 head (Li et al., 2025, arXiv 2503.01840), read from config.json in two formats.

Older checkpoints, as those of the paper's authors, SpecForge and NVIDIA, have a flat config.json with the architecture
LlamaForCausalLMEagle3. Those of the speculators library have `speculators_model_type`, and the decoder's fields in
`transformer_layer_config`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.families.common import layer_windows, optional_window, with_windows
from executor_svc.models.families.llama import read_llama
from executor_svc.models.families.qwen import read_qwen3
from executor_svc.models.specs.spec import DecoderSpec

_OLD_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """Sizes and parts of a head."""

    decoder: DecoderSpec
    """Of its layers; its vocabulary is the target's."""
    draft_vocab_size: int
    """The number of ids that it gives logits for."""
    target_hidden_size: int
    state_layers: tuple[int, ...]
    """Layers of the target before which it reads the hidden states, as `Decoder.forward_with_states` takes them."""
    norm_before_residual: bool = False
    """Whether the first layer's residual is the normalized hidden state."""
    norm_before_fc: bool = False
    """Whether the target's states are normalized together, or with fc_norm each for itself, before the first linear."""
    fc_norm: bool = False
    norm_output: bool = False
    """Whether the next step's hidden state is the normalized one, of which the logits are computed."""

    def digest(self, max_model_len: int) -> bytes:
        """Return sha256 over everything, besides the tensors, that the computation depends on."""
        return hashlib.sha256(repr(self).encode() + self.decoder.digest(max_model_len)).digest()


def is_old_format(content: dict[str, Any]) -> bool:
    """Return whether config.json is that of an older checkpoint; content: of config.json."""
    return content.get("speculators_model_type") is None


def is_eagle3(content: dict[str, Any]) -> bool:
    """Return whether config.json describes a head, of whatever kind, and no model; content: of config.json."""
    named = content.get("architectures")
    is_old = isinstance(named, list) and any(name in _OLD_NAMES for name in named)
    return is_old or not is_old_format(content)


def read_eagle3(content: dict[str, Any], num_target_layers: int) -> Eagle3Spec:
    """Return what a config.json describes; raises ModelConfigError naming the field that is wrong or not supported.

    num_target_layers: of the target, on which the default of the layers depends that the head reads.
    """
    fields = Fields(content)
    if is_old_format(content):
        decoder, options = _old_decoder(content, fields), fields.section("eagle_config")
        flags = {name: fields.flag(name, options.flag(name, False)) for name in _FLAGS}
        draft_vocab_size = fields.integer("draft_vocab_size", decoder.vocab_size)
    else:
        decoder, options = _new_decoder(content, fields), Fields({})
        if fields.get("norm_before_residual") is None:
            raise fields.error("norm_before_residual", "is missing; tools differ in its default")
        flags = {name: fields.flag(name, False) for name in _FLAGS}
        draft_vocab_size = fields.integer("draft_vocab_size")
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise fields.error("fc_norm", "is true, and so is norm_before_fc: only one of them is possible")
    if draft_vocab_size > decoder.vocab_size:
        raise fields.error("draft_vocab_size", f"must be at most vocab_size {decoder.vocab_size}")
    _refuse_unsupported(fields, options)
    return Eagle3Spec(
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=fields.integer("target_hidden_size", decoder.hidden_size),
        state_layers=_state_layers(fields if fields.get(_LAYER_IDS) is not None else options, num_target_layers),
        **flags,
    )


def _old_decoder(content: dict[str, Any], fields: Fields) -> DecoderSpec:
    named = content.get("architectures")
    if not isinstance(named, list) or not any(name in _OLD_NAMES for name in named):
        raise fields.error(
            "architectures",
            f"is {brief(named)}: no EAGLE-3 head. Supported: {', '.join(_OLD_NAMES)}, or speculators_model_type eagle3",
        )
    return _windowed_llama(content)


def _new_decoder(content: dict[str, Any], fields: Fields) -> DecoderSpec:
    kind = content["speculators_model_type"]
    if kind != "eagle3":
        raise fields.error("speculators_model_type", f"{brief(kind)} is not supported; supported: eagle3")
    inner = content.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise fields.error("transformer_layer_config", f"must be an object, not {brief(inner)}")
    model_type = inner.get("model_type")
    if model_type == "llama":
        return _windowed_llama(inner)
    if model_type == "qwen3":
        return read_qwen3(inner)
    raise fields.error("transformer_layer_config", f"has model_type {brief(model_type)}; supported: llama, qwen3")


def _windowed_llama(content: dict[str, Any]) -> DecoderSpec:
    """Return Llama's layers, with windows where `layer_types` has them: heads may, Llama itself never has them."""
    spec, fields = read_llama(content), Fields(content)
    windows = layer_windows(fields, spec.num_layers, optional_window(fields, None), lambda _: False)
    return with_windows(spec, windows)


def _state_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers that config.json names, or vLLM's default of three."""
    ids = fields.get(_LAYER_IDS)
    if ids is None:
        if num_layers < 6:
            raise fields.error(_LAYER_IDS, f"is missing, and a target of {num_layers} layers has no default")
        return 2, num_layers // 2, num_layers - 3
    valid = isinstance(ids, list) and bool(ids) and all(type(each) is int and 0 <= each <= num_layers for each in ids)
    if not valid or ids != sorted(set(ids)):
        raise fields.error(
            _LAYER_IDS, f"must be ascending numbers from 0 to the target's {num_layers} layers, not {brief(ids)}"
        )
    return tuple(ids)


def _refuse_unsupported(fields: Fields, options: Fields) -> None:
    fields.refuse("parallel_drafting", "parallel drafting is not supported")
    for each in (fields, options):
        if each.get("use_aux_hidden_state") is False:
            raise each.error(
                "use_aux_hidden_state", "is false: only heads over the target's hidden states are supported"
            )
        if each.get("is_causal") is False:
            raise each.error("is_causal", "is false: attention must be causal")
        if each.get("logit_scale") not in (None, 1, 1.0):
            raise each.error("logit_scale", f"is {brief(each.get('logit_scale'))}; supported: 1")
