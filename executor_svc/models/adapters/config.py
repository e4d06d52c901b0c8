"""adapter_config.json of PEFT: the fields that LoRA is computed from, and those that are refused by name.

Read from peft 0.21.2: tuners/lora/config.py, tuners/lora/layer.py, config.py.

Which `init_lora_weights` change the base's weights, so that the adapter's file alone does not say the result: pissa and
pissa_niter_N, olora, corda and lora_ga subtract the initial product from the base weight, loftq puts a quantized weight
in its place. eva (it moves ranks, which rank_pattern then holds), gaussian, orthogonal and mica (a fixed B) leave the
base as it is, as true and false do. `save_pretrained(path_initial_model_for_weight_conversion=…)` of peft makes an
ordinary adapter of twice the rank of the former, and writes true.

fan_in_fan_out is about the base's weights, those of GPT-2's Conv1D, and not about the adapter's: it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cadenza_common.brief import brief
from executor_svc.models.adapters.paths import CONFIG_FILE
from executor_svc.models.config.config_fields import Fields

ALL_LINEAR = "all-linear"
"""A value of target_modules: every linear but the head."""

_LARGEST_RANK = 1 << 20
_MOST_PATTERNS = 4096

_REFUSED = {
    "use_dora": "DoRA scales each row by norms of base and adapter together, and is not supported",
    "lora_bias": "biases of lora_B are not supported",
    "alora_invocation_tokens": "activated LoRA (aLoRA) is not supported",
    "layer_replication": "it builds another stack of layers, which is not supported",
    "use_qalora": "QALoRA pools a linear's inputs, which is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "target_parameters": "LoRA on parameters outside of linears is not supported",
    "arrow_config": "Arrow routes between adapters, which is not supported",
    "kasa_config": "KaSA changes the base's weights, which other requests share",
    "monteclora_config": "MonteCLoRA is not supported",
    "velora_config": "VeLoRA is not supported",
    "megatron_config": "Megatron's parallel linears are not supported",
}
"""Fields that change the computation, and why each is refused."""

_WITHOUT_EFFECT = {
    "auto_mapping",
    "corda_config",  # these four: how init_lora_weights computes
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "inference_mode",
    "lora_dropout",  # of training
    "megatron_core",
    "merge_weights",  # peft before 0.3
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "lora_dtype",  # these three: ms-swift's, of training
    "lorap_emb_lr",
    "lorap_lr_ratio",
}

_KEPT_BASE = ("gaussian", "eva", "orthogonal", "mica")
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of adapter_config.json by peft's names and with its meanings."""

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    """By pattern of modules' names, in the file's order: the first that matches counts."""
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    """Names or ends of names of modules; or a pattern; or `ALL_LINEAR`."""
    exclude_modules: tuple[str, ...] | str
    layers_to_transform: tuple[int, ...] | None
    """None: all layers."""
    layers_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    """Of the embeddings' table, or by module."""
    ensure_weight_tying: bool
    init_lora_weights: bool | str
    bias: str
    """Always "none"."""
    fan_in_fan_out: bool
    """Without effect."""
    base_model_name_or_path: str
    """As the file says; nothing depends on it."""

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of a pair's product."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(content: dict[str, Any]) -> AdapterConfig:
    """Return the fields of adapter_config.json.

    Raises ModelConfigError, which names the field, for a value that is wrong, that cannot be computed exactly, or that
    is not supported; also for a field that is not known, unless it is null, false, 0 or empty.
    """
    fields = Fields(content, file=CONFIG_FILE)
    _refuse(fields, content)
    targets = _names_or_pattern(fields, "target_modules")
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        targets = ALL_LINEAR
    config = AdapterConfig(
        r=fields.integer("r", 8, at_most=_LARGEST_RANK),
        lora_alpha=_finite(fields, "lora_alpha", 8 if fields.get("lora_alpha") is None else fields.get("lora_alpha")),
        rank_pattern=_rank_pattern(fields),
        alpha_pattern={
            key: _finite(fields, "alpha_pattern", value) for key, value in _pattern(fields, "alpha_pattern").items()
        },
        use_rslora=fields.flag("use_rslora", default=False),
        target_modules=targets,
        exclude_modules=_names_or_pattern(fields, "exclude_modules"),
        layers_to_transform=_layers(fields),
        layers_pattern=_one_or_more(fields, "layers_pattern"),
        modules_to_save=_one_or_more(fields, "modules_to_save"),
        trainable_token_indices=_token_indices(fields),
        ensure_weight_tying=fields.flag("ensure_weight_tying", default=False),
        init_lora_weights=_init(fields),
        bias="none",
        fan_in_fan_out=fields.flag("fan_in_fan_out", default=False),
        base_model_name_or_path=fields.text("base_model_name_or_path") or "",
    )
    if isinstance(config.target_modules, str):
        for name in ("layers_to_transform", "layers_pattern"):
            if getattr(config, name):
                raise fields.error(name, "cannot be used where target_modules is a text and not a list, as in peft")
    if config.layers_pattern and fields.get("layers_to_transform") is None:
        raise fields.error("layers_pattern", "needs layers_to_transform, as in peft")
    return config


def _refuse(fields: Fields, content: dict[str, Any]) -> None:
    """Raise an error about a field that an exact result cannot have."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        problem = "is missing: it must be LORA" if kind is None else f"is {brief(kind)}: only LORA is supported"
        raise fields.error("peft_type", problem)
    for name, problem in _REFUSED.items():
        fields.refuse(name, problem)
    if fields.get("bias") not in (None, "none"):
        raise fields.error("bias", f"is {brief(fields.get('bias'))}: adapters that change biases are not supported")
    known = AdapterConfig.__dataclass_fields__.keys() | _REFUSED.keys() | _WITHOUT_EFFECT | {"peft_type"}
    for name in content.keys() - known:
        fields.refuse(name, "a field that Cadenza does not know, and that may change the result")


def _init(fields: Fields) -> bool | str:
    value = fields.get("init_lora_weights")
    if value is None or isinstance(value, bool):
        return value is not False
    named = str(value).lower()
    if named in _KEPT_BASE:
        return named
    if named.startswith(_CHANGED_BASE):
        raise fields.error(
            "init_lora_weights",
            f"is {brief(value)}: such an adapter changes the base's weights, which other requests share (peft's "
            "save_pretrained makes an ordinary adapter of it with path_initial_model_for_weight_conversion)",
        )
    raise fields.error("init_lora_weights", f"is {brief(value)}: not supported")


def _finite(fields: Fields, name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) < math.ldexp(1, 100):
        raise fields.error(name, f"must hold finite numbers, not {brief(value)}")
    return number


def _pattern(fields: Fields, name: str) -> dict[str, Any]:
    value = {} if fields.get(name) is None else fields.get(name)
    if not isinstance(value, dict):
        raise fields.error(name, f"must be an object, not {brief(value)}")
    if len(value) > _MOST_PATTERNS:
        raise fields.error(name, f"has {len(value)} patterns: at most {_MOST_PATTERNS} are supported")
    return value


def _rank_pattern(fields: Fields) -> dict[str, int]:
    found = _pattern(fields, "rank_pattern")
    for key, value in found.items():
        if not _is_integer(value) or not 0 < value <= _LARGEST_RANK:
            raise fields.error("rank_pattern", f"must hold positive integers, not {brief(value)} for {brief(key)}")
    return found


def _names_or_pattern(fields: Fields, name: str) -> tuple[str, ...] | str:
    """Return a list of texts or one text; () for null, but target_modules must be there."""
    value = fields.get(name)
    if value is None and name == "target_modules":
        raise fields.error(name, "is missing: it must name modules, by a list or a pattern")
    if value is None or isinstance(value, list) or (value == "" and name != "target_modules"):
        return _texts(fields, name, value or [])
    if not isinstance(value, str):
        raise fields.error(name, f"must be a list of names or a pattern, not {brief(value)}")
    return value


def _one_or_more(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    return _texts(fields, name, [] if value in (None, "") else [value] if isinstance(value, str) else value)


def _texts(fields: Fields, name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error(name, f"must be a list of names, not {brief(value)}")
    return tuple(value)


def _layers(fields: Fields) -> tuple[int, ...] | None:
    value = fields.get("layers_to_transform")
    listed = [value] if _is_integer(value) else [] if value is None else value
    if not isinstance(listed, list) or not all(_is_integer(each) and each >= 0 for each in listed):
        raise fields.error("layers_to_transform", f"must be a layer's index or a list of them, not {brief(value)}")
    return tuple(listed) or None


def _token_indices(fields: Fields) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    value = [] if fields.get("trainable_token_indices") is None else fields.get("trainable_token_indices")
    tables: dict[str, Any] = value if isinstance(value, dict) else {"": value}
    for ids in tables.values():
        if not isinstance(ids, list) or not all(_is_integer(each) and each >= 0 for each in ids):
            raise fields.error("trainable_token_indices", f"must hold lists of token ids, not {brief(ids)}")
        if len(set(ids)) < len(ids):
            raise fields.error("trainable_token_indices", "names a token twice")
    found = {name: tuple(ids) for name, ids in tables.items()}
    return found if isinstance(value, dict) else found[""]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
