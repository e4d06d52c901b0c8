"""What the operations of experts, of latents and on recurrent states must give, as `meanings` has the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.latent import padded_latent
from executor_svc.device.state_reference import ReferenceStatePlan, ReferenceStates
from executor_svc.gpu.checks.meanings import Meaning, Move, Values, rotated
from executor_svc.gpu.expert_linear import DenseExperts, FewBitsExperts
from executor_svc.gpu.kernels.few_bits.widening import widen

_COLUMNS = 128
"""Results of a routed row that are compared."""


def _route(v: Values, n: int, to: Move) -> list[Tensor]:
    bias, scales = (None if v[name] is None else to(v[name]) for name in ("bias", "scales"))
    return [reference.route(to(v["logits"][:n]), v["router"], v["dtype"], bias, scales)[1]]


def _routes(v: Values, result: Any, n: int) -> list[Tensor]:
    """Weights, which say which experts are chosen, too; a few rows may choose among equals otherwise."""
    return [result.weights[:n]]


def _take_routed(v: Values, n: int, to: Move) -> list[Tensor]:
    x, routes = to(v["x"][:n]).double()[:, None], v["routes"]
    weights = to(routes.weights[:n]).double()[..., None]
    return [x * weights if v["weighed"] else x.expand(-1, weights.shape[1], -1)]


def _routed(v: Values, result: Any, n: int) -> list[Tensor]:
    return [result[v["routes"].places[:n]]]


def _multiply_routed(v: Values, n: int, to: Move) -> list[Tensor]:
    routes, tokens = v["routes"], n
    x = to(v["x"][routes.places[:tokens]]).double()
    ids, found = routes.ids[:tokens], []
    for part in v["experts"].parts:
        if isinstance(part, DenseExperts):
            weight = part.weight[:, :_COLUMNS, : x.shape[-1]][ids]
            wide = to(weight).double()
            if part.scale is not None:
                wide = wide * to(part.scale[:, :_COLUMNS][ids]).double()[..., None]
            product = torch.einsum("tkc,tkoc->tko", x, wide)
            found.append(product if part.bias is None else product + to(part.bias[:, :_COLUMNS][ids]).double())
        else:
            found.append(_multiply_few_bits(part, v["x"][routes.places[:tokens]], ids, to))
    return found


def _multiply_few_bits(part: FewBitsExperts, x: Tensor, ids: Tensor, to: Move) -> Tensor:
    """Return the compared results [T, K, columns] of routed rows x [T, K, in_features], expert by expert."""
    columns = min(_COLUMNS, part.rows)
    found = torch.zeros(*ids.shape, columns, dtype=torch.float64, device=to(ids).device)
    for expert in ids.unique().tolist():
        wide = torch.empty(columns, part.weight.columns, dtype=x.dtype, device=x.device)
        widen(part.weight.of_expert(expert), 0, wide)
        rows = x[ids == expert]
        rows = rows if part.orders is None else rows.index_select(1, part.orders[expert])
        found[to(ids == expert)] = reference.linear(to(rows), to(wide), to(part.added[expert, :columns]))
    return found


def _multiplied(v: Values, result: Any, n: int) -> list[Tensor]:
    first, found = 0, []
    for part in v["experts"].parts:
        found.append(result[v["routes"].places[:n]][..., first : first + min(_COLUMNS, part.rows)])
        first += part.rows
    return found


def _combine(v: Values, n: int, to: Move) -> list[Tensor]:
    routes, router = v["routes"], v["router"]
    rows, weights = to(v["rows"][routes.places[:n]]), to(routes.weights[:n])
    total = reference.combine(rows, torch.ones_like(weights) if router.weighs_inputs else weights)
    if v["beside"] is None:
        return [total]
    beside = to(v["beside"][:n]).double()
    return [total + (beside if v["gate"] is None else beside * torch.sigmoid(to(v["gate"][:n]).double()))]


# ---------------------------------------------------------------------- latents


def _write_latents(v: Values, n: int, to: Move) -> list[Tensor]:
    kv, rope, size = to(v["kv"][:n]), v["rope"], len(v["norm"])
    latents = reference.rms_norm(kv[:, :size], to(v["norm"]), v["eps"])
    keys = rotated(kv[:, None, size:].double(), rope, rope.rows[:n], to)[:, 0]
    scales = v["plan"].scales(v["kv_layer"], v["scales"])
    rows = torch.cat([latents, keys], -1)[to(v["plan"].slot_mappings[v["table"], :n]) >= 0]
    return [rows if scales is None else (rows / to(scales.k).double()).clamp(-448, 448)]


def _written_latents(v: Values, result: Any, n: int) -> list[Tensor]:
    layer, slots = v["kv_layer"], v["plan"].slot_mappings[v["table"], :n]
    slots = slots[slots >= 0]
    bits = layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer
    return [_latent_columns(bits[slots // layer.shape[3], 0, 0, slots % layer.shape[3]], v).view(layer.dtype)]


def _latent_columns(rows: Tensor, v: Values) -> Tensor:
    """Return the columns of rows of the cache that mean something: the latent, then the rotated key."""
    shape = v["shape"]
    first = padded_latent(shape.latent)
    return torch.cat([rows[..., : shape.latent], rows[..., first : first + shape.head_size - shape.latent]], -1)


def _latent_attention(v: Values, n: int, to: Move) -> list[Tensor]:
    shape, plan, rope, layer = v["shape"], v["plan"], v["rope"], v["kv_layer"]
    absorb, expand = to(v["absorb"].weight), to(v["expand"].weight)
    plain = absorb.shape[2]
    q = to(v["q"][:n]).double().unflatten(1, (shape.num_heads, -1))
    q = torch.cat([q[..., :plain], rotated(q[..., plain:], rope, rope.rows[:n], to)], -1)
    if rope.query_scales is not None:
        q = q * to(rope.query_scales[rope.rows[:n].clamp(min=0)]).double()[:, None, None]
    starts, lens, tables = (to(each) for each in plan.step(v["table"]))
    scales, cache = plan.scales(layer, v["scales"]), _latent_columns(to(layer).double(), v)
    cache = cache if scales is None else cache * to(scales.k).double()
    return [reference.latent_attention(q, absorb, expand, cache, starts, lens, tables, shape.scale)]


# ---------------------------------------------------------------------- recurrent states


def _of_states(name: str, *rows: str) -> Meaning:
    """Return the meaning of an operation of `ReferenceStates`; rows: arguments with a row for each token."""

    def expected(v: Values, n: int, to: Move) -> list[Tensor]:
        values = dict(v)
        for key, value in v.items():
            if isinstance(value, Tensor):
                values[key] = to(value[:n] if key in rows else value).clone()
        if "memory" in v:
            values["memory"] = v["memory"]._replace(pool=to(v["memory"].pool).clone())
            values["plan"] = _plan(v["plan"], to)
        return [getattr(ReferenceStates(), name)(**values)]

    return Meaning(expected, replaceable=False)


def _plan(plan: Any, to: Move) -> ReferenceStatePlan:
    """Return the reference's plan of the step, which saves nothing."""
    step, seqs = plan.step, plan.num_tiles
    starts, lens, tables = to(step.starts[: seqs + 1]), to(step.lens[:seqs]), to(step.tables[:seqs])
    found = ReferenceStatePlan(tables.shape[1], plan.tail)
    no_saves = torch.zeros(seqs + 1, dtype=torch.int32), torch.zeros(0), torch.zeros(0, tables.shape[1])
    found.fill(starts, lens - starts.diff(), to(step.folded[:seqs]), tables, *no_saves)
    return found


MEANINGS: dict[str, Meaning] = {
    "route": Meaning(_route, _routes, replaceable=False, loose=True),
    "take_routed": Meaning(_take_routed, _routed, replaceable=False),
    "multiply_routed": Meaning(_multiply_routed, _multiplied, replaceable=False),
    "combine": Meaning(_combine, replaceable=False),
    "write_latents": Meaning(_write_latents, _written_latents, replaceable=False),
    "latent_attention": Meaning(_latent_attention, replaceable=False),
    "causal_conv": _of_states("causal_conv", "x"),
    "gated_delta": _of_states("gated_delta", "qkv", "gates", "beta"),
    "mamba": _of_states("mamba", "xbc", "dt"),
    "gated_norm": _of_states("gated_norm", "x", "gate"),
    "multiply": _of_states("multiply", "x", "factors"),
}
"""By the name of the method of the kernels, of experts, latents and states."""
