"""Reference implementation of each operation, in float64. Tests compare every device's kernels with it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from executor_svc.device.experts import Router
from executor_svc.device.kernels import AttentionShape


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019), in float64."""
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension, in float64."""
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.double() + bias.double()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in float64."""
    product = x.double() @ weight.double().t()
    return product if bias is None else product + bias.double()


def add_adapters(
    x: Tensor, y: Tensor, rows: Sequence[int], adapters: Sequence[Sequence[tuple[Tensor, Tensor, float, int]]]
) -> Tensor:
    """Return y [T, out] plus scale * ((x @ a.T) @ b.T) of each part of the rows' adapters, in float64.

    rows: of each of the T rows its adapter's index, -1 for none. A part is (a [r, in], b [columns, r], scale, first
    column of y).
    """
    result = y.double().clone()
    for row, index in enumerate(rows):
        for a, b, scale, first in adapters[index] if index >= 0 else ():
            result[row, first : first + len(b)] += scale * (b.double() @ (a.double() @ x[row].double()))
    return result


def norm_heads(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: AttentionShape) -> Tensor:
    """Return qkv [T, (H + 2 KVH) * DP] in float64 with `rms_norm` on the first D columns of each query and key head."""
    heads = qkv.double().view(qkv.shape[0], -1, shape.padded_head_size)
    parts = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = heads[..., : shape.head_size].split(parts, 1)
    normed = torch.cat([rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v], 1)
    return torch.cat([normed, heads[..., shape.head_size :]], -1).flatten(1)


def add_normed_groups(x: Tensor, into: Tensor, weight: Tensor, eps: float, before: float, after: float) -> Tensor:
    """Return (rms_norm(x * before) + into) * after, each len(weight) columns of x normalized, in float64."""
    groups = (x.double() * before).unflatten(1, (-1, len(weight)))
    return (rms_norm(groups, weight, eps).flatten(1) + into.double()) * after


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(gate) * up, where gate and up are the halves of the last dimension, in float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up in float64, gate and up the halves of the last dimension.

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016), where
    (1 + tanh(u)) / 2 is written sigmoid(2u), which does not cancel.
    """
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """Return gelu(x), as in `gelu_tanh_mul`, in float64."""
    return gelu_tanh_mul(torch.cat([x, torch.ones_like(x)], -1))


def gelu(x: Tensor) -> Tensor:
    """Return x times the normal distribution function of x (Hendrycks and Gimpel, 2016), in float64.

    It is written erfc, which does not cancel below 0.
    """
    wide = x.double()
    result: Tensor = wide * torch.special.erfc(wide / -math.sqrt(2)) / 2
    return result


def relu(x: Tensor) -> Tensor:
    """Return x where it is above 0, else 0, in float64."""
    return x.double().clamp(min=0)


def relu2(x: Tensor) -> Tensor:
    """Return the square of x where it is above 0, else 0, in float64."""
    return x.double().clamp(min=0).square()


def xielu(x: Tensor, scalars: Tensor) -> Tensor:
    """Return xIELU(x) in float64 (Huang and Schlag, 2024, arXiv 2411.13010); scalars: alpha_p, alpha_n, beta, eps."""
    wide, (alpha_p, alpha_n, beta, eps) = x.double(), scalars.double()
    below = (torch.expm1(torch.minimum(wide, eps)) - wide) * alpha_n
    result: Tensor = torch.where(wide > 0, alpha_p * wide.square(), below) + beta * wide
    return result


def finish_logits(logits: Tensor, divisor: float, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / divisor / cap) in float64 (Gemma 2, Granite); cap None: logits / divisor."""
    divided = logits.double() / divisor
    return divided if cap is None else torch.tanh(divided / cap) * cap


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (x[i], x[i + R/2]) of x [T, heads, D] by angles [T, R/2] radians (Su et al., 2021), in float64.

    Columns from R on stay (partial rotary embedding).
    """
    size = angles.shape[1]
    first, second, rest = x.double().split([size, size, x.shape[-1] - 2 * size], -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def write_kv(kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, KVH, D] to kv_layer [N, 2, KVH, B, D] at slot block * B + offset, in place.

    This is the order of the cache's shape; within a head's block a device may use another order.
    """
    block_size = kv_layer.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        kv_layer[block, 0, :, offset] = k[token].to(kv_layer.dtype)
        kv_layer[block, 1, :, offset] = v[token].to(kv_layer.dtype)


def read_kv(kv_layer: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return k and v [length, KVH, D] in float64 of the sequence with this block table."""
    num_blocks = -(-length // kv_layer.shape[3])
    blocks = kv_layer[block_table[:num_blocks].long()].double()  # [n, 2, KVH, B, D]
    both = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return both[0], both[1]


def attention(
    q: Tensor,
    kv_layer: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v [T, H, D] in float64, each token over the positions up to its own.

    Args:
        q: [T, H, D]; head h reads KV head h // (H / KVH).
        kv_layer: [N, 2, KVH, B, D]; positions that no token attends to may have any content.
        query_start_loc, seq_lens, block_tables: as in `forward_batch.ForwardBatch`.
        window: a token at position p attends to positions above p - window only; None: to all from 0.
        softcap: scores s become softcap * tanh(s / softcap) before the mask; None: no softcap.
        sinks: [H], one more score of each head, of no value (gpt-oss); None: none.
        chunk: a token at position p attends to positions from p // chunk * chunk on (Llama 4); None: from 0.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv_layer.shape[2]
    for s, length in enumerate(seq_lens.tolist()):
        start, end = int(query_start_loc[s]), int(query_start_loc[s + 1])
        if end == start:
            continue
        k, v = (t.repeat_interleave(group, 1) for t in read_kv(kv_layer, block_tables[s], length))
        position, key = torch.arange(length - (end - start), length)[:, None], torch.arange(length)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        if chunk is not None:
            seen &= key >= position // chunk * chunk
        v = v.masked_fill(~seen.any(0)[:, None, None], 0.0)  # their weight is 0, but 0 * NaN is NaN
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, end - start, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def latent_rows(kv: Tensor, norm: Tensor, eps: float, angles: Tensor) -> Tensor:
    """Return the rows of the cache [T, L + R] in float64 of kv [T, L + R]; norm [L], angles [T, R / 2] as in `rope`."""
    latents, keys = kv.split([len(norm), kv.shape[1] - len(norm)], -1)
    return torch.cat([rms_norm(latents, norm, eps), rope(keys[:, None], angles)[:, 0]], -1)


def latent_attention(
    q: Tensor,
    absorb: Tensor,
    expand: Tensor,
    kv_layer: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Return latent attention [T, H * V] in float64 of rotated queries (DeepSeek-V2, 2024).

    Args:
        q: [T, H, N + R].
        absorb: [H, L, N]; expand: [H, V, L].
        kv_layer: [N, 2, 1, B, L + R], rows of `latent_rows` in both halves; as in `attention`, like what follows.
    """
    plain = q.double().split([absorb.shape[2], q.shape[2] - absorb.shape[2]], -1)
    queries = torch.cat([torch.einsum("thn,hln->thl", plain[0], absorb.double()), plain[1]], -1)
    found = attention(queries, kv_layer, query_start_loc, seq_lens, block_tables, scale)[..., : absorb.shape[1]]
    return torch.einsum("thl,hvl->thv", found, expand.double()).flatten(1)


def route(
    logits: Tensor, router: Router, dtype: torch.dtype, bias: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ids [T, K] int64 and weights [T, K] float32 of the experts that rows choose by logits [T, E]."""
    wide = logits.float()
    scores = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid(), "logits": wide}[router.scores]
    if router.rounded_scores:
        scores = scores.to(dtype).float()
    choices = scores if bias is None else scores + bias
    if router.groups > 1:
        grouped = choices.unflatten(-1, (router.groups, -1))
        best = grouped.topk(min(2 if router.two_best else 1, grouped.shape[-1]), -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : router.kept_groups]
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        choices = grouped.masked_fill(dropped[..., None], -math.inf).flatten(-2)
    ids = choices.sort(dim=-1, descending=True, stable=True).indices[:, : router.num_chosen]
    weights = scores.gather(-1, ids)
    if router.weighing == "softmax":
        weights = weights.softmax(-1)
    elif router.weighing == "sigmoid":
        weights = weights.sigmoid()
    elif router.weighing == "sparsemixer":
        weights = _mixed(wide, ids, router.jitter, dtype)
    elif router.weighing == "shares":
        weights = weights / (weights.sum(-1, keepdim=True) + router.epsilon).clamp(min=router.least_sum)
    weights = weights * router.factor
    if scales is not None:
        weights = weights * scales[ids]
    return ids, weights.to(dtype).float() if router.rounded else weights


def _mixed(logits: Tensor, ids: Tensor, jitter: float, dtype: torch.dtype) -> Tensor:
    """Return the shares [T, K] of SparseMixer, outside of training; logits: [T, E] float32, numbers of dtype."""
    left, found = logits.clone(), []
    for chosen in ids.split(1, -1):
        best = left.gather(-1, chosen)
        distances = ((best - left).to(dtype) / logits.abs().clamp(min=best).to(dtype)).float()
        near = left.masked_fill(distances > torch.tensor(2 * jitter).to(dtype).float(), -math.inf)
        found.append(near.softmax(-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, -math.inf)
    return torch.cat(found, -1)


def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of rows [T, K, hidden] times weights [T, K], in float64."""
    return (rows.double() * weights.double()[..., None]).sum(-2)
