"""Loads a model: config.json, weights, and what else the scheduler wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.config import ExecutorConfig
from executor_svc.device import Device
from executor_svc.models.base import Architecture, CausalLM, ModelConfigError, ModelGeometry
from executor_svc.models.checkpoint import (
    TOKENIZER_FILES,
    DummyWeights,
    LoaderError,
    SafetensorsWeights,
    read_json,
    resolve_folder,
)
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.numerics import probe

__all__ = ["LoadedModel", "LoaderError", "ModelGeometry", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is known of it."""

    model: CausalLM
    geometry: ModelGeometry
    eos_token_ids: tuple[int, ...]
    """Union of config.json and generation_config.json, ascending."""
    bos_token_id: int | None
    tokenizer: str
    """Folder or hub id to load the tokenizer from; empty where the model has none."""
    weights_digest: bytes
    """sha256 over names, shapes and bytes of all tensors as loaded."""


def load_model(config: ExecutorConfig, device: Device) -> LoadedModel:
    """Load `config.model` onto a device and settle the device's dtype.

    Raises LoaderError for a model that is not there, not whole or not supported (the message names what is wrong),
    and NumericsError where exact numerics were asked for and can not be held on this machine.
    """
    dummy = config.load_format == "dummy"
    folder = resolve_folder(config.model, with_weights=not dummy)
    content = read_json(folder, "config.json", required=True)
    generation = read_json(folder, "generation_config.json", required=False)
    name, architecture = _architecture(folder, content)
    device.adopt_dtype(_checkpoint_dtype(content))
    weights: DummyWeights | SafetensorsWeights
    if dummy:
        weights = DummyWeights(config.seed, device.dtype, device.torch_device)
    else:
        weights = SafetensorsWeights(folder, device.dtype, device.torch_device)
    try:
        sizes = architecture.sizes(content)
        max_model_len = _max_model_len(config, architecture.max_positions(content))
        model = architecture.build(content, max_model_len, weights, device)
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from error
    if isinstance(weights, SafetensorsWeights):
        ignored = architecture.ignored_tensors(content)
        weights.check_all_used(lambda tensor: tensor.endswith(ignored))
    geometry = ModelGeometry(
        name=config.model,
        architecture=name,
        max_model_len=max_model_len,
        dtype=str(device.dtype).removeprefix("torch."),
        num_parameters=weights.num_parameters,
        weight_bytes=weights.num_parameters * device.dtype.itemsize,
        **sizes,
    )
    probe(model, geometry, device, max(config.max_num_batched_tokens, config.max_num_seqs))
    eos = {*_token_ids(content, "eos_token_id"), *_token_ids(generation, "eos_token_id")}
    bos = [*_token_ids(content, "bos_token_id"), *_token_ids(generation, "bos_token_id")]
    return LoadedModel(
        model=model,
        geometry=geometry,
        eos_token_ids=tuple(sorted(token for token in eos if token < geometry.vocab_size)),
        bos_token_id=bos[0] if bos else None,
        tokenizer=_tokenizer(config.model, folder),
        weights_digest=weights.digest(),
    )


def _architecture(folder: Path, content: dict[str, Any]) -> tuple[str, Architecture]:
    named = content.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    given = ", ".join(map(str, named)) or "none"
    supported = ", ".join(sorted(ARCHITECTURES))
    raise LoaderError(
        f"model folder {folder}: architecture {given} in config.json is not supported; supported: {supported}"
    )


def _checkpoint_dtype(content: dict[str, Any]) -> str:
    """Return the dtype that config.json names: `dtype` since transformers 5, `torch_dtype` before."""
    named = content.get("dtype") or content.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


def _max_model_len(config: ExecutorConfig, limit: int) -> int:
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise LoaderError(f"--max-model-len {config.max_model_len}: the model was made for at most {limit} positions")
    return config.max_model_len


def _token_ids(content: dict[str, Any], field: str) -> list[int]:
    """Return a field that may hold one id, a list of them, or nothing."""
    value = content.get(field)
    listed = value if isinstance(value, list) else [value]
    return [token for token in listed if isinstance(token, int) and not isinstance(token, bool) and token >= 0]


def _tokenizer(model: str, folder: Path) -> str:
    """Return what to load the tokenizer from: the folder's full path, or the hub id, or nothing."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ""
    return str(folder.resolve()) if Path(model).expanduser().is_dir() else model
