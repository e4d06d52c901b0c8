"""The error of adapters, beside those of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from executor_svc.models.base import ModelConfigError
from executor_svc.models.folder import LoaderError


class AdapterError(LoaderError):
    """An adapter cannot be used; the message names its folder, and the tensor or the field of adapter_config.json."""


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turn errors about files, fields and tensors into AdapterError with the adapter's folder."""
    try:
        yield
    except (ModelConfigError, LoaderError) as error:
        raise AdapterError(f"adapter {folder}: {error}") from error
