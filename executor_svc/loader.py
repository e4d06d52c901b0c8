"""Loads a model: config.json, weights, and what else the scheduler wants to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.config import ExecutorConfig
from executor_svc.description import ModelGeometry
from executor_svc.device import Device
from executor_svc.model_folder import LoaderError, read_json, resolve_folder, token_ids_of, tokenizer_of
from executor_svc.models.base import CausalLM, ModelConfigError
from executor_svc.models.checkpoint import DummyWeights, SafetensorsWeights
from executor_svc.models.decoder import Decoder, ignored_tensors
from executor_svc.models.registry import ARCHITECTURES
from executor_svc.models.spec import DecoderSpec
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
    spec_digest: bytes
    """sha256 over what config.json says of the computation."""
    shares_prefixes: bool
    """Do a token's keys and values depend on nothing but the tokens before it."""


def load_model(config: ExecutorConfig, device: Device) -> LoadedModel:
    """Load `config.model` onto a device and settle the device's dtype.

    Raises LoaderError for a model that is not there, not whole or not supported (the message names what is wrong),
    and NumericsError where exact numerics were asked for and can not be held on this machine.
    """
    dummy = config.load_format == "dummy"
    folder = resolve_folder(config.model, with_weights=not dummy)
    content = read_json(folder, "config.json", required=True)
    name, spec = _read_spec(folder, content)
    files = {
        "config.json": content,
        "generation_config.json": read_json(folder, "generation_config.json", required=False),
    }
    eos, bos = token_ids_of(folder, files, "eos_token_id"), token_ids_of(folder, files, "bos_token_id")
    max_model_len = _max_model_len(config, spec.context_limit)
    device.adopt_dtype(_checkpoint_dtype(content))
    _check_memory(folder, spec, max_model_len, device)
    weights: DummyWeights | SafetensorsWeights
    if dummy:
        weights = DummyWeights(config.seed, device.dtype, device.torch_device)
    else:
        weights = SafetensorsWeights(folder, device.dtype, device.torch_device)
    model = Decoder(spec, max_model_len, weights, device)
    if isinstance(weights, SafetensorsWeights):
        ignored = ignored_tensors(spec)
        weights.check_all_used(lambda tensor: tensor.endswith(ignored))
    geometry = _geometry(config.model, name, spec, max_model_len, device, weights.num_parameters)
    probe(device, max(config.max_num_batched_tokens, config.max_num_seqs))
    return LoadedModel(
        model=model,
        geometry=geometry,
        eos_token_ids=tuple(sorted(token for token in set(eos) if token < geometry.vocab_size)),
        bos_token_id=bos[0] if bos else None,
        tokenizer=tokenizer_of(config.model, folder),
        weights_digest=weights.digest(),
        spec_digest=spec.digest(max_model_len),
        shares_prefixes=spec.shares_prefixes(max_model_len),
    )


def _read_spec(folder: Path, content: dict[str, Any]) -> tuple[str, DecoderSpec]:
    """Return the first supported architecture that config.json names, and what the file says of the model."""
    named = content.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for name in names:
        if name in ARCHITECTURES:
            try:
                return name, ARCHITECTURES[name](content)
            except ModelConfigError as error:
                raise LoaderError(f"model folder {folder}: {error}") from error
    given, supported = ", ".join(names) or "none", ", ".join(sorted(ARCHITECTURES))
    raise LoaderError(
        f"model folder {folder}: architecture {given} in config.json is not supported; supported: {supported}"
    )


def _geometry(
    model: str, architecture: str, spec: DecoderSpec, max_model_len: int, device: Device, num_parameters: int
) -> ModelGeometry:
    return ModelGeometry(
        name=model,
        architecture=architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        max_model_len=max_model_len,
        dtype=str(device.dtype).removeprefix("torch."),
        num_parameters=num_parameters,
        weight_bytes=num_parameters * device.dtype.itemsize,
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


def _check_memory(folder: Path, spec: DecoderSpec, max_model_len: int, device: Device) -> None:
    """Refuse what can not fit before minutes of loading end in the kernel's out-of-memory killer."""
    needed, free = spec.least_numbers(max_model_len) * device.dtype.itemsize, device.free_memory_bytes()
    if needed > free:
        raise LoaderError(
            f"model folder {folder}: weights and rotary tables for --max-model-len {max_model_len} take {needed} bytes "
            f"in {str(device.dtype).removeprefix('torch.')}, {free} bytes of memory are free"
        )
