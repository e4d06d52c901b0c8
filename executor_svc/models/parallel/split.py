"""How a decoder is divided among ranks: heads, MLP and vocabulary (Shoeybi et al., 2019, arXiv 1909.08053).

Experts are whole on one rank each. `parallel.recurrent` divides recurrent layers, and their states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from executor_svc.device.ranks import Share
from executor_svc.models.base import ModelConfigError
from executor_svc.models.parallel.part import Part
from executor_svc.models.parallel.recurrent import own_recurrence, parts_of
from executor_svc.models.specs.spec import (
    HEAD,
    LAYER_TABLE,
    TABLE,
    DecoderSpec,
    LayerSizes,
    end_shapes,
    shapes_of_expert,
)

ROW_PARALLEL = ("attention.output", "mlp.down", "recurrent.output in parts")
"""Linears of which a rank has columns: the results of all ranks are summed."""
PARTIAL = "shared.down"
"""Likewise, but what a rank's experts give is added before."""


def check_split(spec: DecoderSpec, size: int) -> None:
    """Raise ModelConfigError, by the field's name, for a model that cannot be divided among so many ranks."""
    sizes = {("num_attention_heads", spec.num_heads)}
    for index, layer in enumerate(spec.layers):
        experts = layer.experts
        if layer.has_mlp and (experts is None or experts.names.beside is not None):
            sizes.add(("intermediate_size", spec.sizes(index).intermediate_size))
        if experts is not None and experts.router.num_experts < size:
            raise ModelConfigError(f"num_experts {experts.router.num_experts} are fewer than {size} ranks")
        if experts is not None and experts.shared_size:
            sizes.add(("the intermediate size of shared experts,", experts.shared_size))
    for field, count in sorted(sizes):
        if count % size:
            raise ModelConfigError(f"{field} {count} cannot be divided among {size} ranks")
    for count in sorted({spec.sizes(index).num_kv_heads for index in range(spec.num_layers)}):
        if count % size and size % count:
            raise ModelConfigError(
                f"num_key_value_heads {count} can be neither divided among {size} ranks nor repeated on them"
            )


def spec_of(spec: DecoderSpec, share: Share) -> DecoderSpec:
    """Return what a rank computes of a model: its heads and its part of the MLP, over the whole hidden size.

    Where there are fewer KV heads than ranks, several ranks have the same one.
    """
    own = _sizes_of(LayerSizes(spec.num_kv_heads, spec.head_size, spec.intermediate_size), share)
    layers = (
        replace(
            each,
            sizes=each.sizes and _sizes_of(each.sizes, share),
            recurrent=each.recurrent and own_recurrence(each.recurrent, spec.hidden_size, share),
            experts=each.experts
            and replace(each.experts, share=share, shared_size=each.experts.shared_size // share.size),
        )
        for each in spec.layers
    )
    return replace(
        spec,
        num_heads=spec.num_heads // share.size,
        num_kv_heads=own.num_kv_heads,
        intermediate_size=own.intermediate_size,
        layers=tuple(layers),
    )


def _sizes_of(sizes: LayerSizes, share: Share) -> LayerSizes:
    kv_heads, inner = max(1, sizes.num_kv_heads // share.size), sizes.intermediate_size // share.size
    return LayerSizes(kv_heads, sizes.head_size, inner)


def part_of(name: str, spec: DecoderSpec, share: Share) -> Part | None:
    """Return a rank's part of the tensors of a module, such as model.layers.0.mlp.up_proj; None: it has the whole.

    Also of a tensor of a recurrent layer that belongs to no module, by its own name. spec: of the whole model.
    """
    if name in (TABLE, HEAD):
        return Part((share.of(spec.vocab_size),), False, spec.vocab_size)
    if name == LAYER_TABLE and spec.layer_inputs is not None:
        rows = spec.layer_inputs.vocab_size
        return Part((share.of(rows),), False, rows)
    index, _, module = name.rpartition("layers.")[2].partition(".")
    return _part_of_module(module, int(index), spec, share) if module and index.isdecimal() else None


def _part_of_module(module: str, index: int, spec: DecoderSpec, share: Share) -> Part | None:
    """Return a rank's part of the tensors of a layer's module."""
    recurrent = spec.layers[index].recurrent
    if recurrent is not None and (part := parts_of(recurrent, spec.hidden_size, share).get(module)) is not None:
        return part
    if spec.layers[index].has_attention:
        part = _part_of_attention(module, index, spec, share)
        if part is not None:
            return part
    sizes, names, experts = spec.sizes(index), spec.names, spec.layers[index].experts
    if experts is not None and experts.names.beside is None:
        into, down = experts.names.shared_into, experts.names.shared_down
        return _part_of_mlp(module, into, down, experts.shared_size, 2 if experts.gated else 1, share)
    return _part_of_mlp(module, names.into_mlp, names.down, sizes.intermediate_size, 2 if spec.gated_mlp else 1, share)


def _part_of_attention(module: str, index: int, spec: DecoderSpec, share: Share) -> Part | None:
    sizes, names = spec.sizes(index), spec.names
    if module in ("self_attn", names.head_gate):  # sinks, or a gate: one row for each head
        return Part((share.of(spec.num_heads),), False, spec.num_heads)
    latent = spec.layers[index].latent
    if latent is not None and (size := latent.rows_by_head(spec.names.output).get(module)) is not None:
        return Part((_heads(spec.num_heads, size, share),), module == names.output, spec.num_heads * size)
    heads, keys = _heads(spec.num_heads, sizes.head_size, share), _kv_heads(sizes, share)
    if module in (names.q_norm, names.k_norm):
        if spec.head_norms != "all heads":
            return None  # one for each head
        of_queries = module == names.q_norm
        count = spec.num_heads if of_queries else sizes.num_kv_heads
        return Part((heads if of_queries else keys,), False, count * sizes.head_size)
    if module == names.output:
        return Part((heads,), True, spec.num_heads * sizes.head_size)
    if module in names.qkv:
        of_query = sizes.head_size * (2 if spec.attention_gate else 1)
        q, kv = spec.num_heads * of_query, sizes.num_kv_heads * sizes.head_size
        queries = _heads(spec.num_heads, of_query, share)
        return _part_of_rows(names.qkv.index(module), len(names.qkv), (q, kv, kv), (queries, keys, keys))
    return None


def _part_of_mlp(module: str, into: tuple[str, ...], down: str, size: int, num_into: int, share: Share) -> Part | None:
    """Return a rank's part of an MLP of this size, whose first linears `into` are num_into, perhaps all in one."""
    inner = share.of(size)
    if module == down:
        return Part((inner,), True, size)
    if module not in into:
        return None
    return _part_of_rows(into.index(module), len(into), (size,) * num_into, (inner,) * num_into)


def num_own_elements(spec: DecoderSpec, share: Share) -> int:
    """Return the number of elements of a rank's linears and tables, as `DecoderSpec.num_linear_elements` of all.

    spec: of the whole model.
    """
    found = spec_of(spec, share).num_linear_elements
    for name, (rows, columns) in end_shapes(spec):
        part = part_of(name.removesuffix(".weight"), spec, share)
        found -= 0 if part is None else (rows - part.count) * columns
    return found


def linears_elsewhere(spec: DecoderSpec, share: Share) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Yield the name and shape of each linear of experts of other ranks, and whether it has a bias.

    spec: of the whole model.
    """
    for index, layer in enumerate(spec.layers):
        experts = layer.experts
        if experts is None:
            continue
        for expert in range(experts.router.num_experts):
            if expert % share.size != share.rank:
                for name, shape in shapes_of_expert(experts, expert, spec.hidden_size):
                    yield f"model.layers.{index}.{name}", shape, experts.biased


def _part_of_rows(index: int, num_stored: int, rows: tuple[int, ...], parts: tuple[range, ...]) -> Part:
    """Return a part of a linear among those with these rows, or of one that holds all of their rows."""
    if num_stored == len(rows):
        return Part((parts[index],), False, rows[index])
    starts = accumulate(rows, initial=0)
    return Part(tuple(_moved(part, start) for part, start in zip(parts, starts, strict=False)), False, sum(rows))


def _heads(num_heads: int, head_size: int, share: Share) -> range:
    count = num_heads // share.size * head_size
    return range(share.rank * count, (share.rank + 1) * count)


def _kv_heads(sizes: LayerSizes, share: Share) -> range:
    """Return the rows of this rank's KV heads; with fewer heads than ranks, neighbors have the same one."""
    count = max(1, sizes.num_kv_heads // share.size)
    first = share.rank * sizes.num_kv_heads // share.size
    return range(first * sizes.head_size, (first + count) * sizes.head_size)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
