"""How a decoder is divided among ranks: heads, MLP and vocabulary (Shoeybi et al., 2019, arXiv 1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from executor_svc.device.ranks import Share
from executor_svc.models.base import ModelConfigError
from executor_svc.models.spec import HEAD, TABLE, DecoderSpec

ROW_PARALLEL = ("attention.output", "mlp.down")
"""Linears of which a rank has columns: the results of all ranks are summed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows or columns of a weight [rows, columns], or of a bias [rows]."""

    ranges: tuple[range, ...]
    """Ascending; of columns there is one."""
    of_columns: bool
    total: int
    """Rows, or columns, of the whole."""

    @property
    def count(self) -> int:
        return sum(map(len, self.ranges))

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor."""
        rows, *columns = whole
        return (rows, self.count) if self.of_columns else (self.count, *columns)


def check_split(spec: DecoderSpec, size: int) -> None:
    """Raise ModelConfigError, by the field's name, for a model that cannot be divided among so many ranks."""
    if spec.has_experts:
        raise ModelConfigError("mixtures of experts are not divided among ranks")
    for field, count in (("num_attention_heads", spec.num_heads), ("intermediate_size", spec.intermediate_size)):
        if count % size:
            raise ModelConfigError(f"{field} {count} cannot be divided among {size} ranks")
    if spec.head_norms == "all heads" and size > 1:
        raise ModelConfigError(f"q_norm and k_norm normalize all heads together, which {size} ranks have parts of")
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ModelConfigError(
            f"num_key_value_heads {spec.num_kv_heads} can be neither divided among {size} ranks nor repeated on them"
        )


def spec_of(spec: DecoderSpec, share: Share) -> DecoderSpec:
    """Return what a rank computes of a model: its heads and its part of the MLP, over the whole hidden size.

    Where there are fewer KV heads than ranks, several ranks have the same one.
    """
    size = share.size
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
    )


def part_of(name: str, spec: DecoderSpec, share: Share) -> Part | None:
    """Return a rank's part of the tensors of a module, such as model.layers.0.mlp.up_proj; None: it has the whole.

    spec: of the whole model.
    """
    if name in (TABLE, HEAD):
        return Part((share.of(spec.vocab_size),), False, spec.vocab_size)
    heads, keys, inner = _heads(spec, share), _kv_heads(spec, share), share.of(spec.intermediate_size)
    module, names = name.rpartition("layers.")[2].partition(".")[2], spec.names
    if module == "self_attn":  # its sinks
        return Part((share.of(spec.num_heads),), False, spec.num_heads)
    if module == names.output:
        return Part((heads,), True, spec.num_heads * spec.head_size)
    if module == names.down:
        return Part((inner,), True, spec.intermediate_size)
    if module in names.qkv:
        q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        return _part_of_rows(names.qkv.index(module), len(names.qkv), (q, kv, kv), (heads, keys, keys))
    if module in names.into_mlp:
        count = 2 if spec.gated_mlp else 1
        index, all_rows = names.into_mlp.index(module), (spec.intermediate_size,) * count
        return _part_of_rows(index, len(names.into_mlp), all_rows, (inner,) * count)
    return None


def _part_of_rows(index: int, num_stored: int, rows: tuple[int, ...], parts: tuple[range, ...]) -> Part:
    """Return a part of a linear among those with these rows, or of one that holds all of their rows."""
    if num_stored == len(rows):
        return Part((parts[index],), False, rows[index])
    starts = accumulate(rows, initial=0)
    return Part(tuple(_moved(part, start) for part, start in zip(parts, starts, strict=False)), False, sum(rows))


def _heads(spec: DecoderSpec, share: Share) -> range:
    count = spec.num_heads // share.size * spec.head_size
    return range(share.rank * count, (share.rank + 1) * count)


def _kv_heads(spec: DecoderSpec, share: Share) -> range:
    """Return the rows of this rank's KV heads; with fewer heads than ranks, neighbors have the same one."""
    count = max(1, spec.num_kv_heads // share.size)
    first = share.rank * spec.num_kv_heads // share.size
    return range(first * spec.head_size, (first + count) * spec.head_size)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
