"""Token counts on the device, for penalties: restarted on admission, increased after each step.

A count depends only on the slot's token ids: additions of integers have the same sum in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.sampling.state import RECORD_WORDS, field
from executor_svc.gpu.kernels.variant import Variant

_RECORD_WORDS = tl.constexpr(RECORD_WORDS)
_PENALISED = tl.constexpr(field("penalised"))
_WIDTH = 4096
_TOKENS = 1024
_ROWS = 128
_LAUNCHED = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}


@triton.jit
def _clear(counts, slots, records, vocab, WIDTH: tl.constexpr):
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    if _is_penalised(records, slot):
        ids = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        tl.store(counts + slot * vocab + ids, tl.zeros((WIDTH,), tl.int32), ids < vocab)


@triton.jit
def _count(
    counts, slots, records, token_ids, tokens_stride, num_tokens, num_prompt_tokens, vocab, TOKENS: tl.constexpr
):
    slot = tl.load(slots + tl.program_id(1)).to(tl.int64)
    if _is_penalised(records, slot):
        at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        known = at < tl.load(num_tokens + slot)
        in_prompt = at < tl.load(num_prompt_tokens + slot)
        address = counts + slot * vocab + tl.load(token_ids + slot * tokens_stride + at, known, other=0)
        tl.atomic_or(address, 1, known & in_prompt, sem="relaxed")
        tl.atomic_add(address, 2, known & ~in_prompt, sem="relaxed")


@triton.jit
def _is_penalised(records, slot):
    """Return whether the tokens of a slot are counted; slot -1 is padding, without counts."""
    return tl.load(records + slot * _RECORD_WORDS + _PENALISED, slot >= 0, other=0) != 0


@triton.jit(do_not_specialize=["num_rows"])
def _add(counts, rows, tokens, records, vocab, num_rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(rows + row, row < num_rows, other=-1).to(tl.int64)
    token = tl.load(tokens + row, row < num_rows, other=-1)
    counted = (token >= 0) & _is_penalised(records, slot)
    address = counts + slot * vocab + token
    tl.store(address, tl.load(address, counted, other=0) + 2, counted)


def restart_counts(
    counts: Tensor,
    slots: Tensor,
    records: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    max_tokens: int,
) -> None:
    """Recount the known tokens of these slots; slots without penalties are left out.

    Args:
        counts: [n, vocab] int32, as in SamplingState.
        slots: [S] int32, distinct; -1: padding.
        records, token_ids, num_tokens, num_prompt_tokens: as in SamplingState.
        max_tokens: upper bound of the slots' numbers of tokens.
    """
    check("slots", slots, (slots.shape[0],), torch.int32)
    _check_counts(counts, records)
    num_slots, vocab = counts.shape
    check("token_ids", token_ids, (num_slots, token_ids.shape[1]), torch.int32)
    check("num_tokens", num_tokens, (num_slots,), torch.int32)
    check("num_prompt_tokens", num_prompt_tokens, (num_slots,), torch.int32)
    if not 0 <= max_tokens <= token_ids.shape[1]:
        raise ValueError(f"max_tokens {max_tokens} is not 0 to {token_ids.shape[1]}, the tokens that are held")
    if not slots.shape[0]:
        return
    _clear[triton.cdiv(vocab, _WIDTH), slots.shape[0]](counts, slots, records, vocab, WIDTH=_WIDTH, **_LAUNCHED)
    if max_tokens:
        _count[triton.cdiv(max_tokens, _TOKENS), slots.shape[0]](
            counts, slots, records, token_ids, token_ids.stride(0), num_tokens, num_prompt_tokens, vocab,
            TOKENS=_TOKENS, **_LAUNCHED,
        )  # fmt: skip


def add_tokens(counts: Tensor, rows: Tensor, tokens: Tensor, records: Tensor) -> None:
    """Count one output token for each of R slots; slots without penalties are left out.

    Args:
        counts: [n, vocab] int32, as in SamplingState.
        rows: [R] int32, distinct slots; -1: padding.
        tokens: [R] int64; -1: no token.
        records: as in SamplingState.
    """
    check("rows", rows, (rows.shape[0],), torch.int32)
    check("tokens", tokens, (rows.shape[0],), torch.int64)
    _check_counts(counts, records)
    if rows.shape[0]:
        _add[(triton.cdiv(rows.shape[0], _ROWS),)](
            counts, rows, tokens, records, counts.shape[1], rows.shape[0], ROWS=_ROWS, **_LAUNCHED
        )


def _check_counts(counts: Tensor, records: Tensor) -> None:
    if counts.dim() != 2:
        raise ValueError(f"counts must be a matrix, is {list(counts.shape)}")
    check("counts", counts, tuple(counts.shape), torch.int32)
    check("records", records, (counts.shape[0], RECORD_WORDS), torch.int32)


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time; the vocabulary and strides are multiples of 16 or not."""
    pointers = {"counts": "*i32", "slots": "*i32", "records": "*i32"}
    history = {"token_ids": "*i32", "tokens_stride": "i32", "num_tokens": "*i32", "num_prompt_tokens": "*i32"}
    added = {"counts": "*i32", "rows": "*i32", "tokens": "*i64", "records": "*i32"}
    return [
        Variant(
            f"penalties {name}{'' if divisible else ' odd'}",
            kernel,
            {**signature, **dict.fromkeys(constants, "constexpr")},
            constants,
            divisible=tuple(n for n, kind in signature.items() if kind[0] == "*" or (divisible and n == "vocab")),
            num_warps=_LAUNCHED["num_warps"],
            num_stages=_LAUNCHED["num_stages"],
            fp_fusion=False,
            no_spills=True,
            quick=divisible and name == "count",
        )
        for divisible in (True, False)
        for name, kernel, signature, constants in (
            ("clear", _clear, {**pointers, "vocab": "i32"}, {"WIDTH": _WIDTH}),
            ("count", _count, {**pointers, **history, "vocab": "i32"}, {"TOKENS": _TOKENS}),
            ("add", _add, {**added, "vocab": "i32", "num_rows": "i32"}, {"ROWS": _ROWS}),
        )
    ]
