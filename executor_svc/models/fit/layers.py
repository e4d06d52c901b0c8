"""What the layers of a model take and keep, as the executor will lay them out, and what a rank has of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cadenza_common.gguf.file import GgufFile
from executor_svc.device.kv_cache import layout_of
from executor_svc.device.ranks import Share
from executor_svc.models.base import ModelConfigError
from executor_svc.models.decoder import layer_heads, layer_states
from executor_svc.models.files.stored_names import decoder_names
from executor_svc.models.fit.stored import StoredBytes
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.tensor_names import TensorNames
from executor_svc.models.parallel.split import check_split, part_of, spec_of
from executor_svc.models.registry import ARCHITECTURES, has_code, own_architecture
from executor_svc.models.specs.spec import DecoderSpec, linear_shapes


def _spec(content: dict[str, Any]) -> DecoderSpec | None:
    """Return what a config.json describes; None without code in Cadenza. Raises ModelConfigError."""
    named = content.get("architectures")
    found = own_architecture(named if isinstance(named, list) else [], content.get("model_type"))
    return None if found is None or not has_code(found, content) else ARCHITECTURES[found](content)


def read_kv(
    content: dict[str, Any], item: int, block_size: int, padded: Callable[[int], int], num_ranks: int = 1
) -> tuple[int, dict[int, int], int] | None:
    """Return the longest context, by window, 0: none, the bytes that a token takes, and those of a request's state.

    item: bytes of a number; padded: returns the size of heads in the cache. With ranks it is what one of them keeps.
    None for models without code in Cadenza, and for those that are refused.
    """
    try:
        spec = _spec(content)
    except ModelConfigError:
        return None
    if spec is None:
        return None
    spec = spec_of(spec, Share(0, num_ranks))
    windows, dtype = [layer.window for layer in spec.layers], torch.bfloat16 if item == 2 else torch.float32
    units = [() if each is None else each.unit_bytes(1, dtype) for each in layer_states(spec)]
    layout = layout_of(layer_heads(spec), windows, spec.context_limit, padded, block_size, dtype, units=units)
    groups = zip(layout.windows, layout.pages_per_block, strict=True)
    of_token = {window: layout.page_bytes * pages // block_size for window, pages in groups}
    return spec.context_limit, of_token, layout.page_bytes * layout.pages_per_state


def of_one_rank(
    path: Path, content: dict[str, Any], tensors: Iterable[StoredBytes], num_ranks: int, gguf: GgufFile | None
) -> list[StoredBytes]:
    """Return what rank 0 has of each tensor, no rank has more. Raises LoaderError for a model that is not divided."""
    try:
        spec = _spec(content)
        if spec is not None:
            check_split(spec, num_ranks)
    except ModelConfigError as error:
        raise LoaderError(f"{path}: --tensor-parallel-size {num_ranks}: {error}") from error
    if spec is None:
        raise LoaderError(f"{path}: --tensor-parallel-size {num_ranks}: the model has no code in Cadenza")
    tensors = list(tensors)
    parts, experts = _parts(spec, Share(0, num_ranks)), _own_experts(spec, num_ranks)
    if gguf is None:
        own = decoder_names((each.name for each in tensors), spec.names.first, spec.files)
        modules = {stored: _renamed(spec, name).rpartition(".")[0] for name, stored in own.items()}
    else:
        names = TensorNames(gguf.metadata.text("general.architecture"), spec.head_size)
        modules = {names.stored(f"{module}.weight"): module for module in parts}
    shares = {each.name: experts if each.is_expert else parts.get(modules.get(each.name, ""), 1.0) for each in tensors}
    return [replace(each, num_bytes=round(each.num_bytes * shares[each.name])) for each in tensors]


def _parts(spec: DecoderSpec, share: Share) -> dict[str, float]:
    """Return the share that a rank has of each linear and table, by its module."""
    modules = (name.removesuffix(".weight") for name, _ in linear_shapes(spec))
    parts = ((module, part_of(module, spec, share)) for module in modules)
    return {module: part.count / part.total for module, part in parts if part is not None}


def _renamed(spec: DecoderSpec, name: str) -> str:
    """Return the name of a tensor in Cadenza, which layers of families with experts may have otherwise in files."""
    of_experts = {layer.experts.names for layer in spec.layers if layer.experts is not None}
    for stored, own in (*spec.names.renamed, *(ending for names in of_experts for ending in names.renamed)):
        if name.endswith(f".{stored}"):
            return name.removesuffix(stored) + own
    return name


def _own_experts(spec: DecoderSpec, num_ranks: int) -> float:
    """Return the share of experts that rank 0 has."""
    counts = {layer.experts.router.num_experts for layer in spec.layers if layer.experts is not None}
    return max((-(-count // num_ranks) / count for count in counts), default=1.0)
