"""The fields of config.json about recurrent layers: which layers are, and the sizes of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cadenza_common.brief import brief
from executor_svc.models.config.config_fields import Fields, is_number
from executor_svc.models.specs.recurrent_spec import DeltaNames, GatedDeltaSpec, MambaSpec, RecurrentSpec
from executor_svc.models.specs.spec import DecoderSpec
from executor_svc.plan.state_sizes import DeltaState, MambaState

RECURRENT, ATTENTION = "recurrent", "attention"
LINEAR_TYPES = {"linear_attention": RECURRENT, "full_attention": ATTENTION}
"""What transformers calls the layers of most families in `layer_types`."""
MOST_TAPS = 64
MOST_HEADS, MOST_SIZE = 4096, 4096


def layer_kinds(
    fields: Fields, num_layers: int, kinds: Mapping[str, str], default: Callable[[int], str], name: str = "layer_types"
) -> list[str]:
    """Return the kind of each layer by a list in `name`; if absent, `default(i)`.

    kinds: by what config.json calls them. Raises ModelConfigError naming the entry, also if no layer has attention.
    """
    named = fields.get(name)
    if named is None:
        found = [default(index) for index in range(num_layers)]
    else:
        if not isinstance(named, list) or len(named) != num_layers:
            shown = f"{len(named)} entries" if isinstance(named, list) else brief(named)
            raise fields.error(name, f"must be a list with num_hidden_layers {num_layers} entries, not {shown}")
        for index, kind in enumerate(named):
            if not isinstance(kind, str) or kind not in kinds:
                raise fields.error(
                    f"{name}[{index}]:", f"{brief(kind)} is not supported; supported: {', '.join(kinds)}"
                )
        found = [kinds[kind] for kind in named]
    if ATTENTION not in found:
        raise fields.error(name, "has no layer of attention, which is not supported")
    return found


def with_recurrence(spec: DecoderSpec, kinds: Sequence[str], recurrent: RecurrentSpec) -> DecoderSpec:
    """Return the spec with a recurrence in the place of attention in the layers of this kind."""
    layers = (
        replace(layer, rope=None, latent=None, recurrent=recurrent, has_attention=False) if kind == RECURRENT else layer
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def read_gated_delta(fields: Fields, eps: float, names: DeltaNames) -> GatedDeltaSpec:
    """Return the gated delta rule of Qwen's families; eps: of norms."""
    key_heads = fields.integer("linear_num_key_heads", 16, at_most=MOST_HEADS)
    value_heads = fields.integer("linear_num_value_heads", 32, at_most=MOST_HEADS)
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_value_heads", f"{value_heads} is no multiple of linear_num_key_heads {key_heads}"
        )
    shape = DeltaState(
        key_heads,
        value_heads,
        fields.integer("linear_key_head_dim", 128, at_most=MOST_SIZE),
        fields.integer("linear_value_head_dim", 128, at_most=MOST_SIZE),
        tiled=fields.flag("has_tiled_value_heads", False),  # in GGUF files
    )
    return GatedDeltaSpec(shape, taps(fields, "linear_conv_kernel_dim", 4), eps, names)


def taps(fields: Fields, name: str, default: int) -> int:
    """Return how many inputs a convolution reads."""
    return fields.integer(name, default, at_most=MOST_TAPS)


def read_mamba(
    fields: Fields, inner: int, eps: float, defaults: tuple[int, int, int], head_size: int | None = None
) -> MambaSpec:
    """Return Mamba-2 by the fields `mamba_*`.

    inner: columns of x. defaults: of heads, groups and state size; head_size: None: inner divided among the heads.
    """
    heads = fields.integer("mamba_n_heads", defaults[0], at_most=MOST_HEADS)
    groups = fields.integer("mamba_n_groups", defaults[1], at_most=MOST_HEADS)
    if heads % groups:
        raise fields.error("mamba_n_groups", f"{groups} does not divide mamba_n_heads {heads}")
    if head_size is None:
        auto = fields.get("mamba_d_head") in (None, "auto")
        head_size = inner // heads if auto else fields.integer("mamba_d_head", at_most=MOST_SIZE)
    if heads * head_size != inner:
        raise fields.error("mamba_n_heads", f"{heads} times mamba_d_head {head_size} is not the inner size {inner}")
    shape = MambaState(heads, head_size, fields.integer("mamba_d_state", defaults[2], at_most=MOST_SIZE), groups)
    biased = fields.flag("mamba_proj_bias", False)
    return MambaSpec(
        shape,
        taps(fields, "mamba_d_conv", 4),
        eps,
        conv_biased=fields.flag("mamba_conv_bias", True),
        biased=biased,
        output_biased=biased,
        limits=step_limits(fields),
    )


def step_limits(fields: Fields, name: str = "time_step_limit") -> tuple[float, float]:
    """Return the least and the largest dt; no largest one by default."""
    given = fields.get(name)
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, list) or len(given) != 2:
        raise fields.error(name, f"must be a list of 2 numbers, not {brief(given)}")
    low, high = (_number(each) for each in given)
    if not 0 <= low < high or low == math.inf:
        raise fields.error(name, f"must be a number of at least 0 and a larger one, not {brief(given)}")
    return low, high


def _number(value: object) -> float:
    """Return a number, infinite ones as transformers writes them too; others as NaN."""
    if value in (math.inf, "Infinity", {"__float__": "Infinity"}):
        return math.inf
    return float(value) if is_number(value) and isinstance(value, int | float) else math.nan
