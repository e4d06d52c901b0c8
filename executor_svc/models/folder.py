"""The files without tensors of a model's folder, of a Hugging Face hub model, or a GGUF file. Needs no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from cadenza_common.brief import brief, one_line
from cadenza_common.gguf.file import GgufError, GgufFile, find_gguf, read_gguf
from cadenza_common.hub.download import local_model
from cadenza_common.hub.names import HubError, parse
from cadenza_common.lfs_pointers import LFS_WORDS, is_lfs_pointer
from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartError

_log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
_MOST_CHARACTERS = 2000
"""Of a message."""
_OF_MODELS = (".jinja", ".json", ".model", ".safetensors", ".txt")
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, little endian."""
_MOST_HEADER_BYTES = 100_000_000
"""As safetensors has it."""


class LoaderError(StartError):
    """A model cannot be loaded; the message names the folder or option, and the missing part."""

    def __init__(self, message: str) -> None:
        """Names and values of others' files stand in messages: they are cut, and on one line."""
        super().__init__(one_line(message, _MOST_CHARACTERS))


def looks_like_path(model: str) -> bool:
    """Return whether a model's name cannot be one of the hub."""
    return parse(model) is None


def resolve_folder(model: str, with_weights: bool) -> Path:
    """Return the local folder of a model; downloads the model of a hub id."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise LoaderError(f"--model {model}: neither a folder nor a GGUF file, whose name ends in .gguf")
    if looks_like_path(model):
        raise LoaderError(f"--model {model}: no such {'file' if folder.suffix == '.gguf' else 'folder'}")
    return _download(model, with_weights)


def with_local_files(config: ExecutorConfig) -> ExecutorConfig:
    """Return the options with the GGUF files of the hub, of model and draft, as paths; downloads them.

    Folders of the hub keep their names here, which stand for the tokenizer too. Raises LoaderError.
    """
    paths = {}
    has_draft = config.speculative in ("draft", "eagle3", "auto")
    for option in ("model", "speculative_model") if has_draft else ("model",):
        name = getattr(config, option)
        if name and not Path(name).expanduser().exists() and not looks_like_path(name):
            path = _download(name, with_weights=config.load_format != "dummy")
            if path.is_file():
                paths[option] = str(path)
    return config.model_copy(update=paths) if paths else config


def gguf_of(model: str) -> GgufFile | None:
    """Return the header of a model's GGUF file: `model` itself, or the one in a folder without config.json.

    None: the model is a folder of another kind, or of the hub. Raises LoaderError for a broken file.
    """
    try:
        path = find_gguf(model)
        return None if path is None else read_gguf(path)
    except GgufError as error:
        raise LoaderError(f"--model {model}: {error}") from None


def _download(model: str, with_weights: bool) -> Path:
    name = parse(model)
    assert name is not None
    try:
        return local_model(name, with_weights, _log.info)
    except HubError as error:
        raise LoaderError(f"--model {model}: no such folder, and {error}") from error


def check_files(model: Path, with_weights: bool) -> None:
    """Check that a folder holds a model, as far as its files' names and headers show it, or a GGUF file's header.

    Raises LoaderError.
    """
    if gguf_of(str(model)) is None:
        check_folder(model, with_weights)


def check_folder(folder: Path, with_weights: bool) -> None:
    """Check that a folder holds a model, as far as its files' names and headers show it; raises LoaderError."""
    check_kind(folder)
    read_json(folder, "config.json", required=True)
    if with_weights:
        found = find_weights(folder)
        for path in dict.fromkeys(found.values()) if isinstance(found, dict) else [found]:
            check_safetensors(path)


def check_kind(folder: Path) -> None:
    """Raise LoaderError for a LoRA adapter, and for a clone without its large files."""
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        base = read_json(folder, "adapter_config.json", required=True).get("base_model_name_or_path")
        model = brief(base) if isinstance(base, str) and base else "its model"
        raise LoaderError(
            f"model folder {folder}: it holds a LoRA adapter, no model: serve {model} with --lora NAME={folder}"
        )
    try:
        pointers = sorted(each.name for each in folder.iterdir() if each.suffix in _OF_MODELS and is_lfs_pointer(each))
    except OSError as error:
        raise LoaderError(f"model folder {folder}: cannot be read: {error.strerror or error}") from error
    if pointers:
        raise LoaderError(f"{folder / pointers[0]}: {LFS_WORDS}")


def check_safetensors(path: Path) -> None:
    """Raise LoaderError for a file that is no safetensors file, or that is not as long as its header says.

    `safetensors_file.tensors_of` checks everything, by safetensors, which whoever starts the services has no need of.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
                raise ValueError("it has no header that fits into it: truncated, or another kind of file")
            header = json.loads(file.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = _LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, the file at {size}: truncated, or of another size")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LoaderError(f"{path}: not a readable safetensors file: {error}") from error


def _is_weight_file(name: str) -> bool:
    """Whether an index may name this file: never a pickle, and none of another folder."""
    return name.endswith(".safetensors") and Path(name).name == name


def find_weights(folder: Path) -> Path | dict[str, Path]:
    """Return the file of the weights, or of a sharded checkpoint the file of each tensor; raises LoaderError.

    model.safetensors precedes an index, as in transformers, unless that names it among files that are all there.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file() and not single.is_file():
        return _indexed(folder, index.name)
    if single.is_file():
        return _single(folder, single, index)
    others = sorted(path.name for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    found = f", and {others[0]} is not read" if others else ""
    raise LoaderError(
        f"model folder {folder}: no weights: neither model.safetensors nor model.safetensors.index.json is there"
        f"{found} (--load-format dummy uses random weights)"
    )


def _single(folder: Path, single: Path, index: Path) -> Path | dict[str, Path]:
    """Return model.safetensors, or the files of an index of which it is one."""
    if not index.is_file():
        return single
    with contextlib.suppress(LoaderError):
        files = _indexed(folder, index.name)
        if single in files.values():
            return files
    _log.warning("model folder %s: %s is read; %s, which is of other files, is not", folder, single.name, index.name)
    return single


def _indexed(folder: Path, name: str) -> dict[str, Path]:
    """Return the file of each tensor as an index says; raises LoaderError."""
    content = read_json(folder, name, required=True).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise LoaderError(f"model folder {folder}: {name} has no weight_map")
    odd = sorted({str(file) for file in content.values() if not _is_weight_file(str(file))})
    if odd:
        raise LoaderError(f"model folder {folder}: {name} names {odd[0]}, which is no safetensors file in it")
    missing = sorted({str(file) for file in content.values() if not (folder / str(file)).is_file()})
    if missing:
        raise LoaderError(f"model folder {folder}: weight files named by {name} are missing: {missing[0]}")
    return {tensor: folder / file for tensor, file in content.items()}


def read_json(folder: Path, name: str, required: bool) -> dict[str, Any]:
    """Return a JSON object of the folder; empty if the file is absent and not required."""
    path = folder / name
    try:
        if not path.is_file():
            if required:
                raise LoaderError(f"model folder {folder}: {name} is missing")
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise LoaderError(f"model folder {folder}: {name} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise LoaderError(f"model folder {folder}: {name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LoaderError(f"model folder {folder}: {name} holds no JSON object")
    return content


def token_ids_of(folder: Path, files: dict[str, dict[str, Any]], field: str) -> list[int]:
    """Return all ids in a field of some files; the field may hold one id, a list of ids, or nothing.

    files: contents by file name. Raises LoaderError for other values.
    """
    ids: list[int] = []
    for name, content in files.items():
        value = content.get(field)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
            raise LoaderError(
                f"model folder {folder}: {name}: {field} must be a token id or a list of them, not {brief(value)}"
            )
        ids += [token for token in listed if token >= 0]
    return ids


def tokenizer_of(model: str, folder: Path) -> str:
    """Return the source of the tokenizer: the folder's or GGUF file's absolute path, the hub id, or "" without one.

    Raises LoaderError for a broken GGUF file.
    """
    gguf = gguf_of(model)
    if gguf is not None:
        has_none = gguf.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab")
        return "" if has_none else str(gguf.paths[0].absolute())
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ""
    return str(folder.resolve()) if Path(model).expanduser().is_dir() else model
