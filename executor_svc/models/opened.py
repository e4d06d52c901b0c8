"""A model folder or GGUF file whose config is read: which architecture it has, and of what structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza_common.gguf.file import GgufError, GgufFile
from executor_svc.models.base import ModelConfigError
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.folder import LoaderError, gguf_of, read_json, resolve_folder
from executor_svc.models.gguf.config_content import config_content
from executor_svc.models.gguf.weights import read_vector
from executor_svc.models.quantized.options import texts_of
from executor_svc.models.registry import ARCHITECTURES, has_code, own_architecture
from executor_svc.models.specs.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder or GGUF file whose config is read, and whose tensors are not."""

    folder: Path
    """With `gguf`, that file."""
    content: dict[str, Any]
    """Of config.json, or of metadata that stands for it."""
    gguf: GgufFile | None

    @property
    def names(self) -> list[str]:
        """The architectures that config.json names."""
        named = self.content.get("architectures")
        return named if isinstance(named, list) else []

    @property
    def architecture(self) -> str | None:
        """The first of the names with code in Cadenza, for its form; without names, that of the model type."""
        found = own_architecture(self.names, self.content.get("model_type"))
        return found if found is None or has_code(found, self.content) else None

    def read_spec(self) -> DecoderSpec:
        """Return the structure of an architecture with code in Cadenza; raises LoaderError naming the field."""
        assert self.architecture is not None
        try:
            return ARCHITECTURES[self.architecture](self.content)
        except ModelConfigError as error:
            if self.gguf is not None:
                problem = str(error).removeprefix("config.json: ")
                message = f"{self.folder}: its metadata stands for this in config.json: {problem}"
                raise LoaderError(message) from error
            raise LoaderError(f"model folder {self.folder}: {error}") from error


def open_checkpoint(model: str, with_weights: bool) -> Checkpoint:
    """Return the checkpoint of a folder, GGUF file or hub id; downloads the model of a hub id.

    Raises LoaderError, which names the model as --model.
    """
    gguf = gguf_of(model)
    if gguf is None:
        folder = resolve_folder(model, with_weights=with_weights)
        content = read_json(folder, "config.json", required=True)
        _check_names(folder, Fields(content))
        return Checkpoint(folder, content, None)
    try:
        return Checkpoint(gguf.paths[0], config_content(gguf, lambda name: read_vector(gguf, name)), gguf)
    except GgufError as error:
        raise LoaderError(f"--model {model}: {error}") from None


def _check_names(folder: Path, fields: Fields) -> None:
    """Raise LoaderError for fields of another type than those that say what kind of model this is have."""
    try:
        for name in ("model_type", "dtype", "torch_dtype"):
            fields.text(name)
        texts_of(fields, "architectures")
    except ModelConfigError as error:
        raise LoaderError(f"model folder {folder}: {error}") from None
