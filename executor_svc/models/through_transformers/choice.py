"""Checks whether a causal LM of transformers can run here, by its class and its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.folder import LoaderError
from executor_svc.models.kv_scales import quantizes_kv_alone
from executor_svc.models.registry import has_no_head

FAILURES = (
    RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError, ImportError,
)  # fmt: skip
"""Third-party code in an unusual environment, or with numbers that it does not expect, can raise any error."""
_ALIBI = ("BloomForCausalLM", "MptForCausalLM")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Choice:
    """An architecture of transformers, and the config of a checkpoint."""

    architecture: str
    model_class: Any
    config: Any

    @property
    def context_limit(self) -> int | None:
        """Maximum number of positions of the checkpoint; None if its config has no such field."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None


def find_architecture(names: Sequence[str], model_type: object) -> str | None:
    """Return the first of these names that is a causal LM of transformers with this model_type; None if none is.

    Names as of `registry.has_no_head` leave it to model_type, as in transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    found = KNOWN.get(str(model_type), ())
    known: tuple[str, ...] = found if isinstance(found, tuple) else (found,)
    if known and has_no_head(names):
        return known[0]
    return next((name for name in names if name in known), None)


def choose(folder: Path, architecture: str) -> Choice:
    """Return the class and the config of a checkpoint; raises LoaderError, with the reason, if it cannot run."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = getattr(transformers, architecture)
    except (*FAILURES, OSError, StrictDataclassError) as error:
        message = " ".join(str(error).split())
        raise LoaderError(f"model folder {folder}: transformers cannot read config.json: {message}") from error
    try:
        _drop_kv_quantization(config)
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from error
    reason = _config_reason(config) or _class_reason(model_class, config)
    if reason is not None:
        raise LoaderError(f"model folder {folder}: {architecture} cannot run through transformers here: {reason}")
    return Choice(architecture, model_class, config)


def _drop_kv_quantization(config: Any) -> None:
    """Remove the quantization of keys and values from the config: transformers has no part in the cache."""
    section = getattr(config, "quantization_config", None)
    if isinstance(section, dict) and quantizes_kv_alone(Fields(section, "quantization_config.")):
        del config.quantization_config


def _config_reason(config: Any) -> str | None:
    if getattr(config, "quantization_config", None) is not None:
        return "quantized checkpoints are not supported"
    if getattr(config, "is_encoder_decoder", False):
        return "it is one half of an encoder and a decoder"
    if config.get_text_config() is not config:
        return "it takes more than text"
    return None


def _class_reason(model_class: Any, config: Any) -> str | None:
    import inspect

    if model_class.__name__ in _ALIBI or getattr(config, "alibi", False):
        return "its positions are biases of attention (ALiBi), which Cadenza's attention does not have"
    if getattr(model_class, "_is_stateful", False):
        return "it keeps more of a sequence than keys and values"
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        return f"it has layers of type {strange[0]!r}"
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return "it takes no position_ids"
    return None


def check_length(choice: Choice, max_model_len: int) -> None:
    """Raise LoaderError for lengths that would change rotary frequencies, which are the same for a whole batch here."""
    named = getattr(choice.config, "rope_parameters", None) or {}
    for rope in [named, *(entry for entry in named.values() if isinstance(entry, dict))]:
        kind = rope.get("rope_type")
        limit = rope.get("original_max_position_embeddings") or choice.context_limit
        if kind in ("dynamic", "longrope") and limit is not None and max_model_len > limit:
            raise LoaderError(
                f"--max-model-len {max_model_len}: {choice.architecture} through transformers with rope_type {kind!r} "
                f"can serve {limit} positions at most"
            )
