"""How recurrent layers are divided among ranks: each has some heads or channels, their inputs, and their state.

The one rule is `is_divided`: a layer whose sizes it does not allow is whole on every rank, and all compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import assert_never

from executor_svc.device.ranks import Share
from executor_svc.models.parallel.part import Part
from executor_svc.models.specs.recurrent_spec import GatedDeltaSpec, MambaSpec, RecurrentSpec, ShortConvSpec
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.state_sizes import DeltaState

Units = list[tuple[int, bool]]
"""Rows that belong together, and whether a rank has them; in the order in which they are stored."""


def is_divided(recurrent: RecurrentSpec, hidden: int, size: int) -> bool:
    """Return whether so many ranks, more than one, have parts of a layer; recurrent: of the whole model.

    Channels of a short convolution are divided evenly. So are value heads, and the heads of Mamba; the key heads or
    groups beside them are divided evenly, too, or there are fewer, and as many ranks have each of them.
    """
    match recurrent:
        case ShortConvSpec():
            return size > 1 and hidden % size == 0
        case GatedDeltaSpec():
            heads, shared = recurrent.shape.value_heads, recurrent.shape.key_heads
        case MambaSpec():
            heads, shared = recurrent.shape.heads, recurrent.shape.groups
        case _:
            assert_never(recurrent)
    return size > 1 and heads % size == 0 and (shared % size == 0 or size % shared == 0)


def own_recurrence(recurrent: RecurrentSpec, hidden: int, share: Share) -> RecurrentSpec:
    """Return what a rank computes of a layer of the whole model."""
    size = share.size
    if not is_divided(recurrent, hidden, size):
        return recurrent
    match recurrent:
        case ShortConvSpec():
            return replace(recurrent, channels=hidden // size, share=share)
        case GatedDeltaSpec():
            shape = recurrent.shape
            key_heads = max(1, shape.key_heads // size)
            return replace(
                recurrent,
                shape=replace(shape, key_heads=key_heads, value_heads=shape.value_heads // size),
                share=share,
            )
        case MambaSpec():
            mamba, groups = recurrent.shape, recurrent.shape.groups
            return replace(
                recurrent,
                shape=replace(mamba, heads=mamba.heads // size, groups=max(1, groups // size)),
                share=share,
                groups_of_all=groups if groups < size else 0,
            )
    assert_never(recurrent)


def num_whole(spec: DecoderSpec, size: int) -> int:
    """Return how many recurrent layers of a model are whole on each of so many ranks."""
    recurrent = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
    return sum(not is_divided(each, spec.hidden_size, size) for each in recurrent)


def groups_in_parts(spec: DecoderSpec, size: int) -> int | None:
    """Return the groups of a layer of Mamba whose norms would be over several ranks; None: there is no such layer."""
    for layer in spec.layers:
        if isinstance(layer.recurrent, MambaSpec) and layer.recurrent.has_norm:
            own = own_recurrence(layer.recurrent, spec.hidden_size, Share(0, size))
            if isinstance(own, MambaSpec) and own.groups_of_all:
                return own.groups_of_all
    return None


@lru_cache(maxsize=64)
def parts_of(recurrent: RecurrentSpec, hidden: int, share: Share) -> dict[str, Part]:
    """Return a rank's parts of a layer by the names in it: of modules, of tensors that belong to none.

    Those that are not named, it has whole. recurrent: of the whole model.
    """
    if not is_divided(recurrent, hidden, share.size):
        return {}
    match recurrent:
        case ShortConvSpec():
            return _of_short_conv(recurrent, hidden, share)
        case GatedDeltaSpec():
            return _of_gated_delta(recurrent, share)
        case MambaSpec():
            return _of_mamba(recurrent, share)
    assert_never(recurrent)


def _of_short_conv(spec: ShortConvSpec, hidden: int, share: Share) -> dict[str, Part]:
    channels = [(hidden // share.size, rank == share.rank) for rank in range(share.size)]
    return {spec.into: _rows(channels * 3), spec.conv: _rows(channels), spec.output: _columns(channels)}


def _of_gated_delta(spec: GatedDeltaSpec, share: Share) -> dict[str, Part]:
    shape, names = spec.shape, spec.names
    own_keys, own_values = _own_heads(shape, share)
    keys = [(shape.key_size, head in own_keys) for head in range(shape.key_heads)]
    numbers = [(1, head in own_values) for head in range(shape.value_heads)]
    values = _times(numbers, shape.value_size)
    decays = _times(numbers, shape.key_size if shape.gate_by_key else 1)
    qkv = [*keys, *keys, *values]
    of_key = [slice(*(each * len(numbers) // len(keys) for each in (head, head + 1))) for head in range(len(keys))]
    both = [unit for own in of_key for _ in range(2) for unit in numbers[own]]  # betas and decays, by key head
    into: Sequence[Units]
    if names.low_rank is not None:
        into = keys, keys, values, numbers
    elif len(names.into) == 4:
        into = qkv, values, numbers, numbers
    elif len(names.into) == 3:
        into = qkv, values, both
    else:
        by_key = ([key, key, *values[own], *values[own]] for key, own in zip(keys, of_key, strict=True))
        into = [unit for units in by_key for unit in units], both
    found = {name: _rows(units) for name, units in zip(names.into, into, strict=False)}
    found |= dict.fromkeys(names.low_rank or (), _rows(values))
    convs = [qkv] if len(names.conv) == 1 else [keys, keys, values]
    found |= {name: _rows(units) for name, units in zip(names.conv, convs, strict=True)}
    found |= dict.fromkeys((names.decay, names.ready_decay), _rows(numbers, 2 if shape.gate_by_key else 0))
    return found | {names.dt_bias: _rows(decays), names.output: _columns(values)}


def _of_mamba(spec: MambaSpec, share: Share) -> dict[str, Part]:
    shape, name = spec.shape, spec.name
    own_heads, own_groups = share.of(shape.heads), _own(shape.groups, share)
    numbers = [(1, head in own_heads) for head in range(shape.heads)]
    inner = _times(numbers, shape.head_size)
    states = [(shape.state_size, group in own_groups) for group in range(shape.groups)]
    vectors = (spec.decay, spec.ready_decay, f"{name}.dt_bias", f"{name}.D")
    return {
        spec.into: _rows([*inner, *inner, *states, *states, *numbers]),
        f"{name}.conv1d": _rows([*inner, *states, *states]),
        f"{name}.norm": _rows(inner),
        spec.output: _columns(inner),
        **dict.fromkeys(vectors, _rows(numbers)),
    }


def _own(count: int, share: Share) -> range:
    """Return the key heads or groups that a rank has, of so many; of fewer than ranks, neighbours have the same."""
    first = share.rank * count // share.size
    return range(first, first + max(1, count // share.size))


def _own_heads(shape: DeltaState, share: Share) -> tuple[range, set[int]]:
    """Return the key heads of a rank, and its value heads: some of each of them."""
    keys, sharing = _own(shape.key_heads, share), max(1, share.size // shape.key_heads)
    heads: dict[int, list[int]] = {key: [] for key in keys}
    for head in range(shape.value_heads):
        if (key := shape.key_head(head)) in heads:
            heads[key].append(head)
    own = Share(share.rank % sharing, sharing)
    return keys, {each[place] for each in heads.values() for place in own.of(len(each))}


def _times(units: Units, count: int) -> Units:
    return [(rows * count, own) for rows, own in units]


def _rows(units: Units, axis: int = 0) -> Part:
    return Part(tuple(_ranges(units)), False, sum(rows for rows, _ in units), axis)


def _columns(units: Units) -> Part:
    return Part(tuple(_ranges(units)), True, sum(columns for columns, _ in units))


def _ranges(units: Units) -> Iterable[range]:
    """Yield the rows of a rank; those that touch are one range."""
    first = start = 0
    is_own = False
    for rows, own in (*units, (0, False)):
        if own and not is_own:
            start = first
        elif is_own and not own:
            yield range(start, first)
        first, is_own = first + rows, own
