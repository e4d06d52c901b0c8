"""The fields of config.json about experts, and the layers that have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cadenza_common.brief import brief
from executor_svc.device.experts import Router
from executor_svc.models.config.config_fields import Fields
from executor_svc.models.gguf.expert_content import CHOSEN, COUNTS
from executor_svc.models.specs.spec import DecoderSpec, ExpertNames, ExpertsSpec

_MOST_EXPERTS = 4096
_MOST_CHOSEN = 64


def without_experts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the model that has an MLP in the place of its experts."""
    return {name: value for name, value in config.items() if name not in (*COUNTS, *CHOSEN)}


def read_router(fields: Fields, *, grouped: bool = False, usual: tuple[int, int] | None = None, **rules: Any) -> Router:
    """Return how rows choose experts; rules: as of `Router`, beside the counts and groups.

    grouped: whether the family has groups; fields of others about them say nothing. usual: transformers' numbers of
    experts and of the chosen where config.json has none.
    """
    counts = usual or (None, None)
    count, chosen = _count(fields, COUNTS, counts[0], _MOST_EXPERTS), _count(fields, CHOSEN, counts[1], _MOST_CHOSEN)
    groups, kept = (fields.integer(name, 1) if grouped else 1 for name in ("n_group", "topk_group"))
    if count % groups:
        raise fields.error("n_group", f"{groups} does not divide the number of experts, {count}")
    if kept > groups:
        raise fields.error("topk_group", f"{kept} is more than n_group {groups}")
    if chosen > count // groups * kept:
        raise fields.error(
            _named(fields, CHOSEN), f"{chosen} is more than the {count // groups * kept} experts to choose"
        )
    return Router(count, chosen, groups=groups, kept_groups=kept, **rules)


def with_experts(
    spec: DecoderSpec, experts: ExpertsSpec, is_dense: Callable[[int], bool] = lambda layer: False
) -> DecoderSpec:
    """Return the spec with experts in the layers that are not dense."""
    layers = (layer if is_dense(index) else replace(layer, experts=experts) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def sigmoid_experts(fields: Fields, usual: tuple[int, int] | None = None) -> ExpertsSpec:
    """Return experts that are chosen as those of DeepSeek-V3 (2024), with as many shared ones beside them.

    usual: as of `read_router`.
    """
    size = fields.integer("moe_intermediate_size", 1408)
    return ExpertsSpec(
        read_router(
            fields,
            grouped=True,
            usual=usual,
            scores="sigmoid",
            weighing="shares" if fields.flag("norm_topk_prob", True) else "scores",
            epsilon=1e-20,
            factor=fields.number("routed_scaling_factor", 1.0),
            rounded=False,
        ),
        size,
        ExpertNames(
            choice_bias="mlp.gate.e_score_correction_bias",
            renamed=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
        ),
        router_in_float32=True,
        shared_size=size * count_from_0(fields, "n_shared_experts", 1),
    )


def count_from_0(fields: Fields, name: str, default: int) -> int:
    """Return an integer that may be 0."""
    value = fields.get(name)
    if default == 0 and value is None:
        return 0
    return 0 if value == 0 and value is not False else fields.integer(name, default)


def alike_in_layers(config: dict[str, Any], names: tuple[str, ...], num_layers: int) -> Fields:
    """Return fields in which a list with a number for each layer is that number: it must be the same in all layers."""
    fields, found = Fields(config), dict[str, Any]()
    for name in names:
        value = fields.get(name)
        if not isinstance(value, list):
            continue
        _check_length(fields, name, value, num_layers)
        if any(each != value[0] for each in value):
            raise fields.error(name, f"{brief(value)} differs between layers, which is not supported")
        found[name] = value[0]
    return Fields(config | found)


def by_layer(fields: Fields, name: str, num_layers: int) -> list[Fields]:
    """Return the fields of each layer, of which one may be a list with a number for each."""
    value = fields.get(name)
    if not isinstance(value, list):
        return [fields] * num_layers
    _check_length(fields, name, value, num_layers)
    return [fields.having(name, each) for each in value]


def _check_length(fields: Fields, name: str, value: list[Any], num_layers: int) -> None:
    if len(value) != num_layers:
        raise fields.error(name, f"must have num_hidden_layers {num_layers} entries, not {len(value)}")


def sparse_layers(fields: Fields) -> Callable[[int], bool]:
    """Return which layers are dense by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    return lambda layer: layer in dense or bool((layer + 1) % step)


def _count(fields: Fields, names: tuple[str, ...], default: int | None, most: int) -> int:
    return fields.integer(_named(fields, names), default, at_most=most)


def _named(fields: Fields, names: tuple[str, ...]) -> str:
    """Return the first of the names that config.json has, as a number."""
    found = (name for name in names if fields.get(name) is not None)
    return next(found, names[0])
