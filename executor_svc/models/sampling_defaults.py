"""The sampling parameters that a model's files suggest, for requests that do not say otherwise. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import GgufFile
from executor_svc.config import ExecutorConfig
from executor_svc.models.folder import LoaderError, gguf_of, looks_like_path, read_json, resolve_folder
from executor_svc.models.gguf.rope_content import shortest

_FILE = "generation_config.json"
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""Names of general.sampling's keys that are other ones in generation_config.json."""

_RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number of 0 or more", lambda value: value >= 0),
    "top_p": ("a number over 0 and at most 1", lambda value: 0 < value <= 1),
    "top_k": ("an integer of -1 or more", lambda value: value >= -1 and value == int(value)),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number over 0", lambda value: value > 0),
    "max_new_tokens": ("an integer of 1 or more", lambda value: 1 <= value < 2**31 and value == int(value)),
}
_WIRE_NAMES = {"max_new_tokens": "max_tokens"}
_WHOLE = ("top_k", "max_new_tokens")


def sampling_defaults(config: ExecutorConfig) -> dict[str, float]:
    """Return the fields of SamplingParams that generation_config.json or a GGUF file's metadata names.

    Empty with --generation-config none. As in vLLM `do_sample` has no part in it. Raises LoaderError.
    """
    if config.generation_config == "none" or not config.model:
        return {}
    gguf = gguf_of(config.model)
    if gguf is not None:
        return _checked(config.model, {name: _pair(gguf, name) for name in _RULES})
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        if config.simulate is not None or looks_like_path(config.model):
            return {}
        folder = resolve_folder(config.model, with_weights=False)
    content = read_json(folder, _FILE, required=False)
    return _checked(config.model, {name: (f"{name} in {_FILE}", content.get(name)) for name in _RULES})


def _pair(file: GgufFile, name: str) -> tuple[str, Any]:
    """Return a key of general.sampling and its value, a float as it was written."""
    key = f"general.sampling.{_GGUF_NAMES.get(name, name)}"
    value = file.metadata.get(key)
    return key, shortest(value) if isinstance(value, float) else value


def _checked(model: str, found: dict[str, tuple[str, Any]]) -> dict[str, float]:
    """Return the values that there are, by their name in SamplingParams."""
    values: dict[str, float] = {}
    for name, (place, value) in found.items():
        if value is None:
            continue
        what, holds = _RULES[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _finite(value) or not holds(value):
            raise LoaderError(
                f"--model {model}: {place} must be {what}, not {repr(value)[:100]} (--generation-config none takes no "
                "sampling parameters from the model)"
            )
        values[_WIRE_NAMES.get(name, name)] = int(value) if name in _WHOLE else float(value)
    return values


def _finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
