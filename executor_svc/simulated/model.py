"""The described properties of a simulated model: from options, a folder's config.json, or a GGUF file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import GgufError, GgufFile
from executor_svc.config import ExecutorConfig
from executor_svc.models.config.end_ids import end_ids, media_ids
from executor_svc.models.folder import LoaderError, gguf_of, looks_like_path, read_json, token_ids_of, tokenizer_of
from executor_svc.models.gguf.config_content import config_content, special_token_ids
from executor_svc.plan.description import Fingerprint, ModelGeometry
from executor_svc.simulated import hashing

_DTYPE = "uint64"
_DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """`description.ModelFacts` without a model."""

    geometry: ModelGeometry
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    tokenizer: str
    media_token_ids: tuple[int, ...] = ()


def simulated_model(config: ExecutorConfig) -> SimulatedModel:
    """Return the model of the options, and of the folder or file of --model if there is one; raises LoaderError."""
    folder = Path(config.model).expanduser()
    files: dict[str, dict[str, Any]] = {}
    tokenizer = ""
    gguf = gguf_of(config.model)
    if gguf is not None:
        files = {"config.json": _gguf_content(config.model, gguf)}
        tokenizer = tokenizer_of(config.model, folder)
    elif folder.is_dir():
        files = {name: read_json(folder, name, required=False) for name in ("config.json", "generation_config.json")}
        tokenizer = tokenizer_of(config.model, folder)
    elif looks_like_path(config.model):
        raise LoaderError(f"--model {config.model}: no such folder")
    content = files.get("config.json", {})
    nested = content.get("text_config")
    sizes = content | nested if isinstance(nested, dict) else content
    vocab_size = _size(folder, sizes, "vocab_size", config.simulate_vocab_size, least=2)
    limit = _size(folder, sizes, "max_position_embeddings", _DEFAULT_MAX_MODEL_LEN)
    bos = token_ids_of(folder, files, "bos_token_id")
    return SimulatedModel(
        geometry=_geometry(config.model, folder, sizes, vocab_size, config.max_model_len or limit),
        eos_token_ids=_eos(config, set(_ends(folder, files, gguf)), vocab_size),
        bos_token_id=bos[0] if bos else None,
        tokenizer=tokenizer,
        media_token_ids=media_ids(content, vocab_size),
    )


def _ends(folder: Path, files: dict[str, dict[str, Any]], gguf: GgufFile | None) -> list[int]:
    has_files = gguf is None and folder.is_dir()
    return end_ids(folder, files) if has_files else token_ids_of(folder, files, "eos_token_id")


def _gguf_content(model: str, file: GgufFile) -> dict[str, Any]:
    try:
        eos, bos = special_token_ids(file)
        return config_content(file, lambda name: None) | {"eos_token_id": eos, "bos_token_id": bos}
    except GgufError as error:
        raise LoaderError(f"--model {model}: {error}") from None


def fingerprint(vocab_size: int, *, fast: bool = False) -> Fingerprint:
    """Return the fingerprint: equal for all simulated executors of one vocabulary size and mode, on every machine.

    `fast`: do not promise the same tokens, though they are: so schedulers treat them as those of a fast executor.
    The weights are the same in both modes.
    """
    name = f"simulated {hashing.VERSION}"
    weights_digest = hashlib.sha256(f"{name} {vocab_size}".encode()).digest()
    return Fingerprint(
        mode="fast" if fast else "exact",
        weights_digest=weights_digest,
        dtype=_DTYPE,
        kv_dtype=_DTYPE,
        kernels=name,
        isa="any",
        num_threads=1,
        versions=(name,),
        digest=hashlib.sha256(f"{name} {vocab_size} fast".encode()).digest() if fast else weights_digest,
    )


def _geometry(name: str, folder: Path, sizes: dict[str, Any], vocab_size: int, max_model_len: int) -> ModelGeometry:
    num_heads = _size(folder, sizes, "num_attention_heads", 1)
    hidden_size = _size(folder, sizes, "hidden_size", 1)
    return ModelGeometry(
        name=name,
        architecture="Simulated",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=_size(folder, sizes, "num_hidden_layers", 1),
        num_heads=num_heads,
        num_kv_heads=_size(folder, sizes, "num_key_value_heads", num_heads),
        head_size=_size(folder, sizes, "head_dim", max(1, hidden_size // num_heads)),
        max_model_len=max_model_len,
        dtype=_DTYPE,
        num_parameters=0,
        weight_bytes=0,
    )


def _size(folder: Path, sizes: dict[str, Any], name: str, default: int, least: int = 1) -> int:
    value = sizes.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise LoaderError(
            f"model folder {folder}: {name} {value!r} in config.json is not an integer of {least} or more"
        )
    return value


def _eos(config: ExecutorConfig, found: set[int], vocab_size: int) -> tuple[int, ...]:
    if found:
        return tuple(sorted(token for token in found if token < vocab_size))
    if config.simulate_eos_token_id is None:
        return ()
    if config.simulate_eos_token_id >= vocab_size:
        raise LoaderError(
            f"--simulate-eos-token-id {config.simulate_eos_token_id}: there are {vocab_size} token ids, from 0"
        )
    return (config.simulate_eos_token_id,)
