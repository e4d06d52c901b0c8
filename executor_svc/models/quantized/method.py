"""How a checkpoint's linears are quantized, read from its config.json: which reader opens each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cadenza_common.brief import brief
from executor_svc.device.stored_linear import QuantRows
from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.folder import LoaderError, read_json
from executor_svc.models.kv_scales import quantizes_kv_alone
from executor_svc.models.quantized import awq, compressed_tensors, fp8, gptq
from executor_svc.models.quantized.tensors import CheckpointTensors

_log = logging.getLogger(__name__)

_SECTIONS = ("quantization_config", "compression_config")
_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""The files of AutoGPTQ and AutoAWQ before config.json held their options."""


class Quantization(Protocol):
    """The linears of a checkpoint in few bits."""

    def open(self, tensors: CheckpointTensors, prefix: str, shape: tuple[int, int]) -> QuantRows | None:
        """Return the weight of a linear [out_features, in_features], read later; None: it is dense.

        Raises LoaderError, by the tensor's name and before memory is taken, for missing tensors, other shapes, other
        dtypes, and groups that no kernel has.
        """
        ...


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": compressed_tensors.parse,
    "gptq": gptq.parse,
    "awq": awq.parse,
    "fp8": fp8.parse,
}

_INSTEAD = (
    "Use the dense checkpoint, with --quantization if it shall take less memory, or one that was quantized with GPTQ, "
    "AWQ or llm-compressor"
)


def read_quantization(folder: Path, content: dict[str, Any]) -> Quantization | None:
    """Return how a checkpoint's linears are quantized, None if they are not; content: of config.json.

    Raises LoaderError for a method, or an option of it, that is not supported: the message names it.
    """
    try:
        found = _section(folder, content)
        if found is None or quantizes_kv_alone(found[0]):
            return None
        fields, named = found
        method = str(named).lower().replace("_", "-")
        if method not in _METHODS:
            raise fields.error("quant_method", _refusal(fields, named))
        quantization = _METHODS[method](fields)
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from error
    _log.info("the checkpoint's linears are in few bits: %s", method)
    return quantization


def has_integers(folder: Path, content: dict[str, Any]) -> bool:
    """Return whether any linears of a checkpoint are in few bits, and not in fp8; content: of config.json.

    Raises LoaderError for options that say no such thing.
    """
    try:
        found = _section(folder, content)
        return found is not None and not quantizes_kv_alone(found[0]) and _names_integers(*found)
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from error


def _names_integers(fields: Fields, named: object) -> bool:
    groups = [fields.section("config_groups").section(name) for name in fields.section("config_groups").sections()]
    weights = [each.section("weights") for each in groups]
    in_fp8 = [each.get("type") == "float" and each.get("num_bits") == 8 for each in weights]
    return str(named).lower() != "fp8" and not (in_fp8 and all(in_fp8))


def _section(folder: Path, content: dict[str, Any]) -> tuple[Fields, object] | None:
    """Return the options of the quantization and the name of its method, None if there are none."""
    if Fields(content).section("quantization").has("bits"):
        raise Fields(content).error("quantization", f"is that of MLX: not supported. {_INSTEAD}")
    whole = Fields(content)
    for fields in (whole, whole.section("text_config")):  # Kimi K2.5 has it there
        for name in _SECTIONS:
            section = fields.section(name)
            if fields.get(name):
                return section, section.get("quant_method")
    for name, method in _OLD_FILES.items():
        old = read_json(folder, name, required=False)
        if old:
            return Fields(old, file=name), method
    return None


def _refusal(fields: Fields, named: object) -> str:
    """Return the message about a method that is not supported."""
    if named is None and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        named = "bitsandbytes"
    if named == "mxfp4":
        return f"is 'mxfp4': it is known for the experts of gpt-oss alone. {_INSTEAD}"
    problem = "is missing" if named is None else f"is {brief(named)}: not supported"
    return f"{problem}; supported: {', '.join(_METHODS)}. {_INSTEAD}"
