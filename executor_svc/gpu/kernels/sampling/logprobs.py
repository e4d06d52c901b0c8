"""Logprobs, ranks and best tokens of rows of logits on the device: of sampled tokens, and of prompt tokens.

Computes the same as `sampling.logprobs`: the model's own distribution, before sampling edits or filters it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.sampling.arithmetic import (
    CHUNK,
    NO_KEY,
    SUB,
    best_of_row,
    join,
    joined_id,
    joined_key,
    key_value,
    ordered_key,
)
from executor_svc.gpu.kernels.sampling.edits import find_peaks
from executor_svc.gpu.kernels.sampling.state import VOCABS, SamplingWorkspace, check_vocab, num_blocks, num_chunks
from executor_svc.gpu.kernels.slots.slots import padded
from executor_svc.gpu.kernels.variant import Variant

_NOTHING = tl.constexpr(-0x8000000000000000)
_ANYTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_SUM_WARPS = 8
_REPORT_WARPS = 4


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Logprobs of R tokens; rows without a request or without a token are not written."""

    words: Tensor
    """[`num_words`] int32: the other fields are views of it, each at a multiple of 16 words."""
    chosen: Tensor
    """[R] float32."""
    ranks: Tensor
    """[R] int32, from 1."""
    top_ids: Tensor
    """[R, N] int32, best first, ties to the lowest id; a row that requested n has n, at most N and the vocabulary."""
    top: Tensor
    """[R, N] float32."""

    @classmethod
    def empty(cls, num_rows: int, num_top: int, device: torch.device) -> DeviceLogprobs:
        """Return buffers for `num_rows` rows with at most `num_top` best tokens each."""
        words = torch.zeros(cls.num_words(num_rows, num_top), dtype=torch.int32, device=device)
        return cls.over(words, num_rows, num_top)

    def of_rows(self, first: int, num_rows: int) -> DeviceLogprobs:
        """Return the num_rows rows from `first` on, a multiple of 16, of the same words."""
        views = (each[first : first + num_rows] for each in (self.chosen, self.ranks, self.top_ids, self.top))
        return DeviceLogprobs(self.words, *views)

    @staticmethod
    def num_words(num_rows: int, num_top: int) -> int:
        """Return the words for `num_rows` rows with at most `num_top` best tokens each."""
        return 2 * padded(num_rows) * (1 + num_top)

    @classmethod
    def over(cls, words: Tensor, num_rows: int, num_top: int) -> DeviceLogprobs:
        """Return views of existing words, such as a copy of another object's words."""
        rows = padded(num_rows)
        chosen, ranks, ids, top = words.split((rows, rows, rows * num_top, rows * num_top))
        return cls(
            words,
            chosen[:num_rows].view(torch.float32),
            ranks[:num_rows],
            ids.view(rows, num_top)[:num_rows],
            top.view(torch.float32).view(rows, num_top)[:num_rows],
        )


class RowLogprobsKernel(Protocol):
    """Computes logprobs of rows, as `row_logprobs` does."""

    def __call__(
        self,
        logits: Tensor,
        rows: Tensor,
        sources: Tensor,
        tokens: Tensor,
        num_logprobs: Tensor,
        workspace: SamplingWorkspace,
        out: DeviceLogprobs,
        *,
        after_sampling: bool,
    ) -> None: ...


@triton.jit
def _sum(
    logits, logits_stride, rows, sources, tokens, num_logprobs, num_logprobs_stride, best, tops, sums, ahead, vocab,
    num_chunks, num_blocks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """For a chunk of each row with logprobs: mass, tokens before the chosen one, and the largest key of each block."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    x_row, token, requested = _requested_row(
        logits, logits_stride, rows, sources, tokens, num_logprobs, num_logprobs_stride, row
    )
    if requested >= 0:
        peak = key_value(joined_key(best_of_row(best, row, 0, num_chunks, CHUNKS)))
        ids = chunk * CHUNK + tl.arange(0, CHUNK // SUB)[:, None] * SUB + tl.arange(0, SUB)[None, :]
        x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
        key = tl.where(ids < vocab, ordered_key(x), NO_KEY)
        chosen = ordered_key(tl.load(x_row + token))
        before = (key > chosen) | ((key == chosen) & (ids < token))
        at = row * num_chunks + chunk
        tl.store(sums + at, tl.sum(tl.sum(tl.exp(x - peak), axis=1), axis=0))
        tl.store(ahead + at, tl.sum(tl.sum(before.to(tl.int32), axis=1), axis=0))
        if requested > 0:
            block = chunk * (CHUNK // SUB) + tl.arange(0, CHUNK // SUB)
            tl.store(tops + row * num_blocks + block, tl.max(key, axis=1), block < num_blocks)


@triton.jit
def _report(
    logits, logits_stride, rows, sources, tokens, num_logprobs, num_logprobs_stride, best, tops, sums, ahead, vocab,
    num_chunks, num_blocks, out_chosen, out_ranks, out_top_ids, out_top, num_top,
    CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """Write the logprob and rank of each row's token, then its best tokens one after the other."""
    row = tl.program_id(0).to(tl.int64)
    x_row, token, requested = _requested_row(
        logits, logits_stride, rows, sources, tokens, num_logprobs, num_logprobs_stride, row
    )
    if requested >= 0:
        peak = key_value(joined_key(best_of_row(best, row, 0, num_chunks, CHUNKS)))
        chunk = tl.arange(0, CHUNKS)
        there = chunk < num_chunks
        total = tl.sum(tl.load(sums + row * num_chunks + chunk, there, other=0.0).to(tl.float64), axis=0)
        log_total = tl.log(total) + peak
        tl.store(out_chosen + row, (tl.load(x_row + token).to(tl.float64) - log_total).to(tl.float32))
        tl.store(out_ranks + row, tl.sum(tl.load(ahead + row * num_chunks + chunk, there, other=0), axis=0) + 1)
        index = tl.arange(0, BLOCKS)
        keys = tl.load(tops + row * num_blocks + index, (index < num_blocks) & (requested > 0), other=NO_KEY)
        last = tl.full((), _ANYTHING, tl.int64)
        number = tl.full((), 0, tl.int32)
        requested = tl.minimum(tl.minimum(requested, num_top), vocab)
        while number < requested:
            # The first of equal blocks: all of its ids are lower.
            block = joined_id(tl.max(join(keys, index), axis=0))
            ids = block * SUB + tl.arange(0, SUB)
            x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
            joined = tl.where(ids < vocab, join(ordered_key(x), ids), _NOTHING)
            taken = tl.max(tl.where(joined < last, joined, _NOTHING), axis=0)
            rest = tl.max(tl.where(joined < taken, joined, _NOTHING), axis=0)
            keys = tl.where(index == block, joined_key(rest), keys)
            last = taken
            value = key_value(joined_key(taken)).to(tl.float64)
            tl.store(out_top_ids + row * num_top + number, joined_id(taken))
            tl.store(out_top + row * num_top + number, (value - log_total).to(tl.float32))
            number += 1


@triton.jit
def _requested_row(logits, logits_stride, rows, sources, tokens, num_logprobs, num_logprobs_stride, row):
    """Return (pointer to the row's logits, its token, its number of best tokens requested; -1: no logprobs)."""
    slot = tl.load(rows + row).to(tl.int64)
    token = tl.load(tokens + row).to(tl.int32)
    requested = tl.load(num_logprobs + slot * num_logprobs_stride, (slot >= 0) & (token >= 0), other=-1)
    return logits + tl.load(sources + row).to(tl.int64) * logits_stride, token, requested


def row_logprobs(
    logits: Tensor,
    rows: Tensor,
    sources: Tensor,
    tokens: Tensor,
    num_logprobs: Tensor,
    workspace: SamplingWorkspace,
    out: DeviceLogprobs,
    *,
    after_sampling: bool,
) -> None:
    """Write logprobs of R tokens in two launches, or three.

    Args:
        logits: [L, vocab] float32 with adjacent columns, finite where they are read.
        rows: [R] int32, each row's index into `num_logprobs`; -1: padding.
        sources: [R] int32, the logits row that each row reads.
        tokens: [R] int64; -1: none, as for a row that cannot be sampled.
        num_logprobs: [n] int32, may be strided: number of best tokens, 0: only the chosen one, -1: no logprobs. For
            sampled rows this is the num_logprobs of the records.
        workspace: for at least R rows.
        out: buffers of R rows.
        after_sampling: whether `sample` was called last with these logits, rows, sources and workspace.
    """
    num_rows, num_top = _check(logits, rows, sources, tokens, num_logprobs, workspace, out)
    if not num_rows:
        return
    w, vocab = workspace, logits.shape[1]
    chunks, blocks = num_chunks(vocab), num_blocks(vocab)
    if not after_sampling:
        find_peaks[chunks, num_rows](
            logits, logits.stride(0), rows, sources, w.best, w.tops, vocab, chunks, blocks,
            TOPS=False, CHUNK=CHUNK, SUB=SUB, **_options(_SUM_WARPS),
        )  # fmt: skip
    inputs = (
        logits, logits.stride(0), rows, sources, tokens, num_logprobs, num_logprobs.stride(0), w.best, w.tops, w.sums,
        w.race_ids, vocab, chunks, blocks,
    )  # fmt: skip
    _sum[chunks, num_rows](*inputs, **_sum_constants(vocab), **_options(_SUM_WARPS))
    _report[(num_rows,)](
        *inputs, out.chosen, out.ranks, out.top_ids, out.top, num_top,
        **_report_constants(vocab), **_options(_REPORT_WARPS),
    )  # fmt: skip


def _check(
    logits: Tensor,
    rows: Tensor,
    sources: Tensor,
    tokens: Tensor,
    num_logprobs: Tensor,
    workspace: SamplingWorkspace,
    out: DeviceLogprobs,
) -> tuple[int, int]:
    """Return (R, N); raises ValueError, which names the argument."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"logits must be a float32 matrix with adjacent columns, is {logits.dtype} {list(logits.shape)}"
        )
    check_vocab(logits.shape[1])
    num_rows = rows.shape[0]
    if workspace.vocab != logits.shape[1]:
        raise ValueError(f"workspace is for a vocabulary of {workspace.vocab}, not {logits.shape[1]}")
    if workspace.best.shape[0] < num_rows:
        raise ValueError(f"workspace is for {workspace.best.shape[0]} rows at most, not {num_rows}")
    check("rows", rows, (num_rows,), torch.int32)
    check("sources", sources, (num_rows,), torch.int32)
    check("tokens", tokens, (num_rows,), torch.int64)
    if num_logprobs.dim() != 1 or num_logprobs.dtype != torch.int32:
        raise ValueError(f"num_logprobs must be an int32 vector, is {num_logprobs.dtype} {list(num_logprobs.shape)}")
    num_top = out.top_ids.shape[1]
    check("out.chosen", out.chosen, (num_rows,), torch.float32)
    check("out.ranks", out.ranks, (num_rows,), torch.int32)
    check("out.top_ids", out.top_ids, (num_rows, num_top), torch.int32)
    check("out.top", out.top, (num_rows, num_top), torch.float32)
    return num_rows, num_top


def _sum_constants(vocab: int) -> dict[str, Any]:
    return {"CHUNKS": triton.next_power_of_2(num_chunks(vocab)), "CHUNK": CHUNK, "SUB": SUB}


def _report_constants(vocab: int) -> dict[str, Any]:
    return {
        "CHUNKS": triton.next_power_of_2(num_chunks(vocab)),
        "BLOCKS": triton.next_power_of_2(num_blocks(vocab)),
        "SUB": SUB,
    }


def _options(num_warps: int) -> dict[str, Any]:
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time, for vocabularies up to each of some powers of two."""
    inputs = {
        "logits": "*fp32", "logits_stride": "i32", "rows": "*i32", "sources": "*i32", "tokens": "*i64",
        "num_logprobs": "*i32", "num_logprobs_stride": "i32", "best": "*i64", "tops": "*i32", "sums": "*fp32",
        "ahead": "*i32", "vocab": "i32", "num_chunks": "i32", "num_blocks": "i32",
    }  # fmt: skip
    outputs = {"out_chosen": "*fp32", "out_ranks": "*i32", "out_top_ids": "*i32", "out_top": "*fp32", "num_top": "i32"}
    return [
        Variant(
            name=f"logprobs {name} vocab{vocab}{'' if divisible else ' odd'}",
            kernel=kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constants=constants,
            divisible=tuple(
                n
                for n, kind in signature.items()
                if (kind[0] == "*" and n != "num_logprobs") or (divisible and n in ("logits_stride", "vocab"))
            ),
            num_warps=num_warps,
            num_stages=1,
            fp_fusion=False,
            no_spills=True,
            quick=name == "report" and vocab == 131072 and divisible,
        )
        for vocab in VOCABS
        for divisible in ((True, False) if vocab == VOCABS[1] else (True,))
        for name, kernel, signature, constants, num_warps in (
            ("sum", _sum, inputs, _sum_constants(vocab), _SUM_WARPS),
            ("report", _report, {**inputs, **outputs}, _report_constants(vocab), _REPORT_WARPS),
        )
    ]
