"""Reads an adapter's folder in PEFT's format, for a decoder with code in Cadenza."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor_svc.models.adapters.adapter import Adapter, EmbeddingPart, LoraPart, TokenRows
from executor_svc.models.adapters.config import parse_config
from executor_svc.models.adapters.contents import AdapterLimits, Contents, FilePair, find_contents
from executor_svc.models.adapters.modules import EMBEDDING, LinearName, decoder_modules
from executor_svc.models.adapters.paths import CONFIG_FILE, allowed_file
from executor_svc.models.adapters.targets import Targets, find_targets
from executor_svc.models.base import ModelConfigError, StoredWeight
from executor_svc.models.files.content_digest import ContentDigest
from executor_svc.models.files.stored_order import row_order
from executor_svc.models.folder import LoaderError
from executor_svc.models.safetensors_file import StoredTensor, tensors_of
from executor_svc.models.specs.spec import HEAD, DecoderSpec

WEIGHTS_FILE = "adapter_model.safetensors"

BaseTable = Callable[[str], StoredWeight]
"""Opens the base's table of `EMBEDDING` or `HEAD`, [vocabulary, hidden] in the model's dtype."""

_MOST_CONFIG_BYTES = 4 << 20
_MOST_HEADER_BYTES = 16 << 20
_BLOCK_BYTES = 4 << 20


class AdapterError(LoaderError):
    """An adapter cannot be used; the message names its folder, and the tensor or the field of adapter_config.json."""


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turn errors about files, fields and tensors into AdapterError with the adapter's folder."""
    try:
        yield
    except (ModelConfigError, LoaderError) as error:
        raise AdapterError(f"adapter {folder}: {error}") from error


def read_adapter(
    folder: Path,
    spec: DecoderSpec,
    limits: AdapterLimits | None = None,
    *,
    base_table: BaseTable | None = None,
    roots: Sequence[Path] | None = None,
) -> Adapter:
    """Return the adapter of a folder, read once; its memory is bounded by the model and the limits.

    base_table: with it, a table that the file holds whole counts as its rows that differ from the base's, and peft's
    copies of the base's table as nothing; None: all rows count. roots: as in `paths.allowed_file`.

    Raises AdapterError.
    """
    limits = limits or AdapterLimits()
    with naming(folder):
        config = parse_config(_read_config(allowed_file(folder, CONFIG_FILE, roots)))
        modules = decoder_modules(spec)
        targets = find_targets(config, modules, spec.tied)
        path = _weights_file(folder, roots)
        before = _state(path)
        _check_header(path)
        contents = find_contents(tensors_of(path), targets, modules, spec.tied, limits)
        adapter = _TensorReader(contents, targets, spec.tied, limits, base_table)
        linears, embedding = adapter.pairs()
        embedding_rows, head_rows = adapter.rows()
        if _state(path) != before:
            raise LoaderError(f"{WEIGHTS_FILE} was changed while it was read")
        parts = [part for parts in linears.values() for part in parts]
        content = content_hash(parts, embedding, embedding_rows, head_rows)
        return Adapter(config, linears, embedding, embedding_rows, head_rows, content)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise LoaderError(f"{CONFIG_FILE} is missing")
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_CONFIG_BYTES + 1)
        if len(text) > _MOST_CONFIG_BYTES:
            raise LoaderError(f"{CONFIG_FILE} has more than {_MOST_CONFIG_BYTES} bytes")
        content = json.loads(text)
    except RecursionError:
        raise LoaderError(f"{CONFIG_FILE} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise LoaderError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise LoaderError(f"{CONFIG_FILE} holds no JSON object")
    return content


def _weights_file(folder: Path, roots: Sequence[Path] | None) -> Path:
    if (folder / WEIGHTS_FILE).is_file():
        return allowed_file(folder, WEIGHTS_FILE, roots)
    for other in ("adapter_model.bin", f"{WEIGHTS_FILE}.index.json"):
        if (folder / other).exists():
            raise LoaderError(f"{WEIGHTS_FILE} is missing, and {other} is not read: it must be one safetensors file")
    raise LoaderError(f"{WEIGHTS_FILE} is missing")


def _state(path: Path) -> tuple[int, ...]:
    """Return what differs when another file is put in this one's place."""
    try:
        found = path.stat()
    except OSError as error:
        raise LoaderError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _check_header(path: Path) -> None:
    """Raise LoaderError for a header that would take much memory: a thousand tensors need some 200 KB."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
    except OSError as error:
        raise LoaderError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    if size > _MOST_HEADER_BYTES:
        raise LoaderError(f"{WEIGHTS_FILE}: a header of {size} bytes: at most {_MOST_HEADER_BYTES} are read")


class _TensorReader:
    """Reads the tensors of a file, in the order of their bytes."""

    def __init__(
        self,
        contents: Contents,
        targets: Targets,
        tied: bool,
        limits: AdapterLimits,
        base_table: BaseTable | None,
    ) -> None:
        self._contents = contents
        self._targets = targets
        self._tied = tied
        self._limits = limits
        self._base_table = base_table

    def pairs(self) -> tuple[dict[tuple[int | None, LinearName], tuple[LoraPart, ...]], EmbeddingPart | None]:
        """Return the pairs of each linear, and those of the table."""
        stored = [tensor for pair in self._contents.pairs for tensor in (pair.a, pair.b)]
        read = {tensor.name: _whole(tensor) for tensor in sorted(stored, key=lambda tensor: tensor.offset)}
        linears: dict[tuple[int | None, LinearName], tuple[LoraPart, ...]] = {}
        embedding = None
        for pair in self._contents.pairs:
            a, b = read[pair.a.name], read[pair.b.name]
            linear = pair.target.module.linear
            if linear is None:
                embedding = EmbeddingPart(a.t().contiguous(), b, pair.target.scale)
            else:
                use = pair.target.module.layer, linear
                linears[use] = (*linears.get(use, ()), _part(pair, a, b))
        return linears, embedding

    def rows(self) -> tuple[TokenRows | None, TokenRows | None]:
        """Return the rows of the table, and of the head."""
        found = {table: _token_rows(ids, _whole(tensor)) for table, (ids, tensor) in self._contents.rows.items()}
        shares = self._targets.head_shares_rows
        for table, tensor in self._contents.tables.items():
            rows = self._changed(table, tensor)
            if rows is not None:
                self._check_tied(table, tensor)
                found[table] = rows
        embedding = found.get(EMBEDDING)
        return embedding, embedding if shares else found.get(HEAD)

    def _check_tied(self, table: str, tensor: StoredTensor) -> None:
        """Raise LoaderError if peft would change the one table of a tied model in two places."""
        if self._tied and table not in self._targets.saved:
            raise LoaderError(
                f"tensor {tensor.name} differs from the model's, whose embedding and head are one table; only "
                "modules_to_save may change one of them alone"
            )

    def _changed(self, table: str, tensor: StoredTensor) -> TokenRows | None:
        """Return the rows of a whole table that differ from the base's; None: none of them."""
        vocabulary, hidden = tensor.shape
        size = max(1, _BLOCK_BYTES // (hidden * 4))
        base: Iterator[Tensor | None] = repeat(None)
        if self._base_table is not None:
            base = iter(self._base_table(EMBEDDING if self._tied else table).blocks(size))
        ids, rows, count = [], [], 0
        for first, block in zip(range(0, vocabulary, size), tensor.blocks(size), strict=True):
            _check_finite(tensor, block)
            same = next(base)
            kept = torch.arange(len(block))
            if same is not None:
                kept = (block.to(same.dtype) != same).any(1).nonzero().flatten()
            count += len(kept)
            if count > self._limits.max_token_rows:
                raise LoaderError(
                    f"tensor {tensor.name} has over {self._limits.max_token_rows} rows that are not the base's: so "
                    "many are not supported"
                )
            ids.append(kept + first)
            rows.append(block[kept])
        return TokenRows(torch.cat(ids), torch.cat(rows)) if count else None


def _part(pair: FilePair, a: Tensor, b: Tensor) -> LoraPart:
    module = pair.target.module
    if module.stored_rows:
        b = b[row_order(module.stored_rows)]
    return LoraPart(module.name, a, b, pair.target.scale, module.first_row)


def _token_rows(ids: tuple[int, ...], rows: Tensor) -> TokenRows:
    token_ids, order = torch.tensor(ids, dtype=torch.int64).sort()
    return TokenRows(token_ids, rows[order])


def _whole(tensor: StoredTensor) -> Tensor:
    whole = tensor.whole()
    _check_finite(tensor, whole)
    return whole


def _check_finite(tensor: StoredTensor, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise LoaderError(f"tensor {tensor.name} holds numbers that are not finite")


def content_hash(
    parts: Iterable[LoraPart],
    embedding: EmbeddingPart | None,
    embedding_rows: TokenRows | None,
    head_rows: TokenRows | None,
) -> bytes:
    """Return 32 bytes over modules, shapes, values and scales, as the weights' digest is made (docs/decisions/0032).

    Equal for the same values in another folder, under other names of tensors, in another order, or in another dtype
    that holds them exactly; other for another alpha or rank, even where some product would be the same.
    """
    found = []
    for part in parts:
        found.append(_digest(part.module, [part.a, part.b], part.scale))
    if embedding is not None:
        found.append(_digest("embedding", [embedding.a, embedding.b], embedding.scale))
    for name, rows in (("embedding rows", embedding_rows), ("head rows", head_rows)):
        if rows is not None:
            found.append(_digest(name, [rows.token_ids, rows.rows], 1.0))
    return hashlib.sha256(b"".join(sorted(found))).digest()


def _digest(name: str, tensors: list[torch.Tensor], scale: float) -> bytes:
    content = ContentDigest(f"{name} {[list(tensor.shape) for tensor in tensors]} {scale.hex()}")
    for tensor in tensors:
        content.update(tensor.float() if tensor.dtype.is_floating_point else tensor)
    return content.digest()
