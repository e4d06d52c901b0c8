"""What the operations of a model's layers must give: of each recorded call, its reference's results.

References are those of `device.reference`, in float64, on copies at the host; or on the device itself, where an
operation of PyTorch's takes the place of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from executor_svc.device import reference
from executor_svc.device.kernels import HeadNorms, Rope
from executor_svc.gpu.kernels.few_bits.layout import TILE
from executor_svc.gpu.kernels.few_bits.widening import widen

Values = Mapping[str, Any]
"""Arguments of a call of `GpuKernels` by name."""
Move = Callable[[Tensor], Tensor]
"""Where a reference gets a tensor: a copy at the host, or as it is."""
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": reference.gelu,
    "gelu_tanh": reference.gelu_tanh,
    "relu": reference.relu,
    "relu2": reference.relu2,
    "sigmoid": lambda x: torch.sigmoid(x.double()),
}


def whole_results(values: Values, result: Any, n: int) -> list[Tensor]:
    """Return the first n rows of each result."""
    return [each[:n] for each in (result if isinstance(result, tuple) else (result,))]


class Meaning(NamedTuple):
    """What a call must give, and where it is."""

    expected: Callable[[Values, int, Move], list[Tensor]]
    """Arguments: before the call; rows that are computed; where to compute."""
    found: Callable[[Values, Any, int], list[Tensor]] = whole_results
    """The same results on the device, after the call."""
    replaceable: bool = True
    """Whether the reference can be computed in place of the kernel: it reads no number on the host."""
    loose: bool = False
    """Whether few of the results may be others altogether."""


def _embed(v: Values, n: int, to: Move) -> list[Tensor]:
    return [to(v["table"][v["token_ids"][:n]]).double() * v["scale"]]


def _embed_few_bits(v: Values, n: int, to: Move) -> list[Tensor]:
    """The rows of the tiles that the tokens are in, as `widen` gives them."""
    table, ids = v["table"], v["token_ids"][:n]
    tiles, at = torch.unique(ids // TILE, return_inverse=True)
    wide = torch.zeros(len(tiles), TILE, table.columns, dtype=v["dtype"], device=ids.device)
    for tile, rows in zip(tiles.tolist(), wide, strict=True):
        widen(table, tile * TILE, rows[: min(TILE, table.rows - tile * TILE)])
    return [to(wide[at, ids % TILE]).double() * v["scale"]]


def _take_rows(v: Values, n: int, to: Move) -> list[Tensor]:
    return [to(v["table"][v["ids"][:n]]).double()]


def _copy_columns(v: Values, n: int, to: Move) -> list[Tensor]:
    return [to(v["source"][:n, v["from_column"] : v["from_column"] + v["columns"]]).double()]


def _copied(v: Values, result: Any, n: int) -> list[Tensor]:
    return [result[:n, v["to_column"] : v["to_column"] + v["columns"]]]


def _rms_norm(v: Values, n: int, to: Move) -> list[Tensor]:
    return [reference.rms_norm(to(v["x"][:n]), to(v["weight"]), v["eps"])]


def _layer_norm(v: Values, n: int, to: Move) -> list[Tensor]:
    return [reference.layer_norm(to(v["x"][:n]), to(v["weight"]), to(v["bias"]), v["eps"])]


def _sum(v: Values, n: int, to: Move) -> Tensor:
    x: Tensor = to(v["x"][:n]).double() * v["scale"]
    return x + to(v["residual"][:n]).double()


def _add_rms_norm(v: Values, n: int, to: Move) -> list[Tensor]:
    total = _sum(v, n, to)
    return [reference.rms_norm(total, to(v["weight"]), v["eps"]), total]


def _add_layer_norm(v: Values, n: int, to: Move) -> list[Tensor]:
    total = _sum(v, n, to)
    return [reference.layer_norm(total, to(v["weight"]), to(v["bias"]), v["eps"]), total]


def _add(v: Values, n: int, to: Move) -> list[Tensor]:
    total = _sum(v, n, to)
    return [total if v["factor"] is None else total * to(v["factor"]).double()]


def _add_normed_groups(v: Values, n: int, to: Move) -> list[Tensor]:
    x, into, weight = to(v["x"][:n]), to(v["into"][:n]), to(v["weight"])
    return [reference.add_normed_groups(x, into, weight, v["eps"], v["before"], v["after"])]


def _activate(v: Values, n: int, to: Move) -> list[Tensor]:
    x = to(v["x"][:n])
    return [reference.xielu(x, to(v["scalars"])) if v["name"] == "xielu" else _PLAIN[v["name"]](x)]


def _activate_times(v: Values, n: int, to: Move) -> list[Tensor]:
    x, first = v["x"][:n], v["from_column"]
    return [_PLAIN[v["name"]](to(x)) * to(v["factors"][:n, first : first + x.shape[1]]).double()]


def _clipped_swiglu(v: Values, n: int, to: Move) -> list[Tensor]:
    gate, up = to(v["gate_up"][:n]).double().chunk(2, -1)
    gate, up = gate.clamp(max=v["limit"]), up.clamp(-v["limit"], v["limit"])
    return [(up + 1) * gate * torch.sigmoid(v["alpha"] * gate)]


def _argmax(v: Values, n: int, to: Move) -> list[Tensor]:
    scores = to(v["scores"][:n])
    best, ids = scores.max(-1, keepdim=True).values, torch.arange(scores.shape[1], device=scores.device)
    lowest = torch.where(scores == best, ids, scores.shape[1]).min(-1).values
    usable = ~scores.isnan().any(-1) & best[:, 0].isfinite()
    return [torch.where(usable, lowest, -1)]


def _finish_logits(v: Values, n: int, to: Move) -> list[Tensor]:
    scores = to(v["scores"][:n])
    if v["divisor"] == 1.0 and v["cap"] is None:
        return [scores.double()]
    return [reference.finish_logits(scores, v["divisor"], v["cap"])]


def _scale_rows(v: Values, n: int, to: Move) -> list[Tensor]:
    return [to(v["x"][:n]).double() * v["scale"]]


# ---------------------------------------------------------------------- attention


def rotated(x: Tensor, rope: Rope, rows: Tensor, to: Move) -> Tensor:
    """Return heads x [T, heads, D] in float64, the first R columns rotated by the tables' rows of the tokens."""
    cos, sin = (to(table[rows.clamp(min=0)]).double()[:, None] for table in (rope.cos, rope.sin))
    size = cos.shape[-1]
    turned = torch.cat([x[..., size // 2 : size], x[..., : size // 2]], -1)
    return torch.cat([x[..., :size] * cos + turned * sin, x[..., size:]], -1)


def _normed_heads(heads: Tensor, weight: Tensor, norms: HeadNorms, size: int, to: Move) -> Tensor:
    wide = to(weight)[:size]
    return torch.cat([reference.rms_norm(heads[..., :size], wide, norms.eps), heads[..., size:]], -1)


def heads_of(v: Values, n: int, to: Move) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [n, heads, DP] in float64, as they are to be."""
    shape, norms, rope = v["shape"], v["norms"], v["rope"]
    width, size = shape.padded_head_size, shape.head_size
    heads = to(v["qkv"][:n]).double().unflatten(1, (-1, width))
    q, rest = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
    k, value = rest[:, : shape.num_kv_heads], rest[:, -shape.num_kv_heads :] if rest.shape[1] else rest
    rows = rope.rows[:n]
    if norms is not None and norms.kind == "all heads":
        q, k = (_all_heads(each, to(weight), norms.eps, size) for each, weight in ((q, norms.q), (k, norms.k)))
    elif norms is not None:
        if norms.v is not None:
            value = _normed_heads(value, norms.v, norms, size, to)
        if norms.kind == "heads":
            q, k = _normed_heads(q, norms.q, norms, size, to), _normed_heads(k, norms.k, norms, size, to)
    q, k = rotated(q, rope, rows, to), rotated(k, rope, rows, to)
    if norms is not None and norms.kind == "heads after rope":
        q, k = _normed_heads(q, norms.q, norms, size, to), _normed_heads(k, norms.k, norms, size, to)
    if rope.query_scales is not None:
        q = q * to(rope.query_scales[rows.clamp(min=0)]).double()[:, None, None]
    return q, k, value


def _all_heads(heads: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    """Return all heads of a row normalized together, over their first `size` columns each."""
    own = heads[..., :size]
    mean = own.square().mean((-1, -2), keepdim=True)
    return heads / torch.sqrt(mean + eps) * weight.double().view(heads.shape[1:])


def _rope_write_kv(v: Values, n: int, to: Move) -> list[Tensor]:
    q, k, value = heads_of(v, n, to)
    scales = v["plan"].scales(v["kv_layer"], v["scales"])
    if not k.shape[1]:
        return [q]
    written = v["plan"].slot_mappings[v["table"], :n] >= 0
    k, value = k[to(written)], value[to(written)]
    if scales is not None:
        k, value = k / to(scales.k).double()[:, None], value / to(scales.v).double()[:, None]
    limit = 448.0 if v["kv_layer"].dtype == torch.float8_e4m3fn else torch.inf
    return [q, k.clamp(-limit, limit), value.clamp(-limit, limit)]


def _written(v: Values, result: Any, n: int) -> list[Tensor]:
    layer, slots = v["kv_layer"], v["plan"].slot_mappings[v["table"], :n]
    shape, width = v["shape"], v["shape"].padded_head_size
    if v["qkv"].shape[1] == shape.num_heads * width:
        return [result[:n]]
    slots = slots[slots >= 0]
    bits = layer.view(torch.uint8) if layer.dtype.itemsize == 1 else layer
    pages, places = slots // layer.shape[3], slots % layer.shape[3]
    return [result[:n], *(bits[pages, half, :, places].view(layer.dtype) for half in (0, 1))]


def _attention(v: Values, n: int, to: Move) -> list[Tensor]:
    shape, plan, layer = v["shape"], v["plan"], v["kv_layer"]
    starts, lens, tables = plan.step(v["table"])
    scales, cache = plan.scales(layer, v["scales"]), to(layer).double()
    if scales is not None:
        cache = cache * torch.stack([to(scales.k), to(scales.v)]).double()[None, :, :, None, None]
    sinks = None if v["sinks"] is None else to(v["sinks"])
    more = shape.window, shape.softcap, sinks, shape.chunk
    q = to(v["q"][:n])
    return [reference.attention(q, cache, to(starts), to(lens), to(tables), shape.scale, *more).flatten(1)]


MEANINGS: dict[str, Meaning] = {
    "embed": Meaning(_embed),
    "embed_few_bits": Meaning(_embed_few_bits, replaceable=False),
    "take_rows": Meaning(_take_rows),
    "copy_columns": Meaning(_copy_columns, _copied),
    "rms_norm": Meaning(_rms_norm),
    "add_rms_norm": Meaning(_add_rms_norm),
    "layer_norm": Meaning(_layer_norm),
    "add_layer_norm": Meaning(_add_layer_norm),
    "add": Meaning(_add),
    "add_normed_groups": Meaning(_add_normed_groups),
    "activate": Meaning(_activate),
    "activate_times": Meaning(_activate_times),
    "clipped_swiglu": Meaning(_clipped_swiglu),
    "argmax": Meaning(_argmax),
    "finish_logits": Meaning(_finish_logits),
    "scale_rows": Meaning(_scale_rows),
    "rope_write_kv": Meaning(_rope_write_kv, _written),
    "attention": Meaning(_attention, replaceable=False),
}
"""By the name of the method of `GpuKernels`."""
