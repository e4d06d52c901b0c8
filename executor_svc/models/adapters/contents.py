"""What an adapter's file must hold for a config and a model, checked before any of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from executor_svc.models.adapters.modules import EMBEDDING, Module
from executor_svc.models.adapters.paths import CONFIG_FILE
from executor_svc.models.adapters.targets import LoraTarget, Targets
from executor_svc.models.adapters.tensor_names import Kind, parse_name
from executor_svc.models.folder import LoaderError
from executor_svc.models.safetensors_file import StoredTensor
from executor_svc.models.specs.spec import HEAD

_IN_CODE = {".forget_gate.": ".", ".mlp.shared_experts.": ".block_sparse_moe.shared_experts."}
"""What transformers' code calls otherwise than files of the model (Kimi Linear)."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Named = Mapping[tuple[str, Kind], StoredTensor]
"""Tensors by module and kind."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Bounds of the memory of one adapter."""

    max_rank: int = 64
    """--max-lora-rank."""
    max_token_rows: int = 4096
    """Of each table, rows that differ from the base's."""


@dataclass(frozen=True, slots=True)
class FilePair:
    """A LoRA pair in the file; of an embedding a is [r, vocabulary]."""

    target: LoraTarget
    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True, slots=True)
class Contents:
    """All tensors of a file, each with its use."""

    pairs: tuple[FilePair, ...]
    """In the order of modules."""
    rows: Mapping[str, tuple[tuple[int, ...], StoredTensor]]
    """Token ids and their rows [n, hidden], by table."""
    tables: Mapping[str, StoredTensor]
    """Whole tables [vocabulary, hidden]."""


def find_contents(
    stored: Mapping[str, StoredTensor],
    targets: Targets,
    modules: Mapping[str, Module],
    tied: bool,
    limits: AdapterLimits,
) -> Contents:
    """Return the use of each tensor.

    Raises LoaderError, which names the tensor, the module or the field, for tensors that are missing, of other shapes
    or dtypes, too large, or without a use.
    """
    named = _by_module(stored, modules)
    for (name, _), tensor in named.items():
        if name not in modules:
            raise LoaderError(f"tensor {tensor.name}: {_lacking(name, modules)}")
    left = dict(named)
    pairs = tuple(_pair(targets.pairs[name], left, limits) for name in modules if name in targets.pairs)
    rows = {table: _rows(table, ids, modules[table], left, limits) for table, ids in targets.token_ids.items()}
    tables = {}
    for table in (EMBEDDING, HEAD):
        found = _table(table, targets, modules[table], left, tied)
        if found is not None:
            tables[table] = found
    both = sorted(rows.keys() & tables.keys())
    if both:
        raise LoaderError(f"tensor {tables[both[0]].name}: trainable_token_indices holds rows of it, too: not both")
    if left:
        raise LoaderError(_without_use(*next(iter(left.items()))))
    if not (pairs or rows or tables):
        raise LoaderError(f"{CONFIG_FILE}: target_modules names no module of the model, and nothing else is changed")
    return Contents(pairs, rows, tables)


def _by_module(
    stored: Mapping[str, StoredTensor], modules: Mapping[str, Module]
) -> dict[tuple[str, Kind], StoredTensor]:
    found: dict[tuple[str, Kind], StoredTensor] = {}
    adapters: dict[str, str] = {}
    own = {module.stored_name: name for name, module in modules.items()}
    for name, tensor in stored.items():
        parts = parse_name(name)
        if parts.adapter is not None:
            adapters.setdefault(parts.adapter, name)
        if len(adapters) > 1:
            first, second = adapters.values()
            raise LoaderError(f"tensors {first} and {second} are of two adapters")
        other = found.setdefault((_own_name(parts.module, own), parts.kind), tensor)
        if other is not tensor:
            raise LoaderError(f"tensors {other.name} and {name} are of one module: one of them must go")
    return found


def _own_name(name: str, own: Mapping[str, str]) -> str:
    """Return a module's name in Cadenza; own: these by names in files. Unknown ones stay as they are."""
    for in_code, in_files in _IN_CODE.items():
        if name not in own and (renamed := name.replace(in_code, in_files)) in own:
            return own[renamed]
    return own.get(name, name)


def _lacking(name: str, modules: Mapping[str, Module]) -> str:
    if "experts" in name.split("."):
        return f"{name} is of experts, of which rows choose some: adapters may change all other linears of a mixture"
    num_layers = 1 + max(module.layer for module in modules.values() if module.layer is not None)
    layer_of, first = next((each.layer, each.stored_name) for each in modules.values() if each.layer is not None)
    before = f"{first.partition(f'.{layer_of}.')[0]}."
    layer = name.removeprefix(before).partition(".")[0]
    if name.startswith(before) and layer.isdecimal() and int(layer) >= num_layers:
        return f"the model has {num_layers} layers"
    return f"the model has no linear or table {name} that adapters may change (those are named as in {first})"


def _pair(target: LoraTarget, left: dict[tuple[str, Kind], StoredTensor], limits: AdapterLimits) -> FilePair:
    module, rank = target.module, target.rank
    kinds: tuple[Kind, Kind] = ("lora_A", "lora_B")
    outputs, inputs = module.shape
    if module.name == EMBEDDING:
        kinds = ("lora_embedding_A", "lora_embedding_B")
        outputs, inputs = inputs, outputs  # the table is the transpose of a linear's weight
    if rank > limits.max_rank:
        raise LoaderError(
            f"{CONFIG_FILE}: r or rank_pattern gives {module.name} a rank of {rank}: at most {limits.max_rank} "
            "(--max-lora-rank)"
        )
    found = [left.pop((module.name, kind), None) for kind in kinds]
    a, b = found
    if a is None or b is None:
        lacking = " and ".join(kind for kind, tensor in zip(kinds, found, strict=True) if tensor is None)
        there = next((f"tensor {tensor.name} is there, but " for tensor in found if tensor is not None), "")
        reason = "" if there else ", which the config names"
        raise LoaderError(f"{there}there is no {lacking} of {module.name}{reason}")
    _check(a, (rank, inputs))
    _check(b, (outputs, rank))
    return FilePair(target, a, b)


def _rows(
    table: str, ids: tuple[int, ...], module: Module, left: dict[tuple[str, Kind], StoredTensor], limits: AdapterLimits
) -> tuple[tuple[int, ...], StoredTensor]:
    rows = left.pop((table, "rows"), None)
    if rows is None:
        raise LoaderError(f"there are no token_adapter.trainable_tokens_delta of {table}, which the config names")
    vocabulary, hidden = module.shape
    if ids and max(ids) >= vocabulary:
        raise LoaderError(f"{CONFIG_FILE}: trainable_token_indices has {max(ids)}: the vocabulary has {vocabulary}")
    if len(ids) > limits.max_token_rows:
        raise LoaderError(
            f"{CONFIG_FILE}: trainable_token_indices has {len(ids)} tokens of {table}: at most "
            f"{limits.max_token_rows} are supported"
        )
    _check(rows, (len(ids), hidden))
    return ids, rows


def _table(
    table: str, targets: Targets, module: Module, left: dict[tuple[str, Kind], StoredTensor], tied: bool
) -> StoredTensor | None:
    """Return a table that the file holds whole; those that modules_to_save names must be there."""
    kinds: tuple[Kind, Kind] = ("table", "base table")
    found = [tensor for kind in kinds if (tensor := left.pop((table, kind), None)) is not None]
    if len(found) > 1:
        raise LoaderError(f"tensors {found[0].name} and {found[1].name} are of one table: one of them must go")
    if not found:
        if table in targets.saved:
            raise LoaderError(f"there is no weight of {table}, which modules_to_save names")
        return None
    _check(found[0], module.shape)
    return found[0]


def _check(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise LoaderError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}; the model and {CONFIG_FILE} say {list(shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise LoaderError(f"tensor {tensor.name} is {tensor.stored_as}: adapters may be F32, BF16 or F16")


def _without_use(use: tuple[str, Kind], tensor: StoredTensor) -> str:
    module, kind = use
    if kind == "rows":
        return f"tensor {tensor.name}: trainable_token_indices does not name {module}"
    if kind in ("table", "base table"):
        return f"tensor {tensor.name}: whole weights are supported of embed_tokens and lm_head alone"
    embedding = kind in ("lora_embedding_A", "lora_embedding_B")
    if embedding != (module == EMBEDDING):
        return f"tensor {tensor.name}: {module} is {'no' if embedding else 'a'} table of embeddings"
    return f"tensor {tensor.name}: the config does not name {module} as a target"
