"""Samples tokens on the device, without a sort: launches the kernels of `edits`, `floors` and `draw`.

Samples the same tokens as `sampling.sampler` from the same logits, parameters, seeds and histories, unless two
tokens' race values, or a sum of probabilities and top_p, differ by less than the rounding of exp and log. A row's token
does not depend on the other rows: sums are folded within chunks of the vocabulary that are the same for every row and
every number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from executor_svc.gpu.kernels.rows import check
from executor_svc.gpu.kernels.sampling.arithmetic import CHUNK, SUB
from executor_svc.gpu.kernels.sampling.draw import finish, race
from executor_svc.gpu.kernels.sampling.edits import edit, find_peaks
from executor_svc.gpu.kernels.sampling.floors import find_floors
from executor_svc.gpu.kernels.sampling.state import (
    RECORD_WORDS,
    VOCABS,
    SamplingState,
    SamplingWorkspace,
    check_vocab,
    num_blocks,
    num_chunks,
    num_words,
)
from executor_svc.gpu.kernels.variant import Variant

# Entries of a slot's lists that are processed together.
_LANES = 128
# Tokens of the listed blocks that are processed together, and pivots that are tried at once.
_TILE = 2048
_PIVOTS = 8
_PEAK_WARPS = 8
_EDIT_WARPS = 16
_RACE_WARPS = 16
_FINISH_WARPS = 16


def sample(
    logits: Tensor,
    rows: Tensor,
    sources: Tensor,
    state: SamplingState,
    workspace: SamplingWorkspace,
    out_tokens: Tensor,
    out_errors: Tensor,
    *,
    edited: bool = True,
    drawn: bool = True,
    filtered: bool = True,
    floored: bool = True,
) -> None:
    """Choose a token for each of R rows, in two to four launches.

    Args:
        logits: [L, vocab] float32 with adjacent columns; not changed.
        rows: [R] int32, slot of each row; -1: padding, for which nothing is written.
        sources: [R] int32, the logits row that each row reads.
        state: the slots' state; token ids are read only for bad words.
        workspace: for at least R rows.
        out_tokens: [R] int64; -1 where there is an error.
        out_errors: [R] int32: 0, or the SlotError.
        edited: whether any row may need edits of its logits, by lists or penalties.
        drawn: whether any row may have a temperature above 0.
        filtered: whether any of the drawn rows may draw from its most likely tokens.
        floored: whether any of the drawn rows may have a floor.
    """
    num_rows, vocab = _check(logits, rows, sources, state, workspace, out_tokens, out_errors)
    if not num_rows:
        return
    filtered = filtered and drawn
    w, chunks, blocks = workspace, num_chunks(vocab), num_blocks(vocab)
    read = (logits, logits.stride(0), rows, sources)
    peaks = (*read, w.best, w.tops, vocab, chunks, blocks)
    shape = {"TOPS": filtered, "CHUNK": CHUNK, "SUB": SUB}
    if edited:
        lists = state.lists
        edit[chunks, num_rows](
            *peaks, state.records, state.token_ids, state.token_ids.stride(0), state.num_tokens,
            state.num_prompt_tokens, state.counts, state.allowed_bits, state.allowed_bits.shape[1], lists.bias_ids,
            lists.biases, lists.word_ids, lists.word_following, lists.stop_ids, w.edited, w.edited.stride(0),
            w.edited_rows, **shape, LANES=_LANES, **_options(_EDIT_WARPS),
        )  # fmt: skip
    else:
        find_peaks[chunks, num_rows](*peaks, **shape, **_options(_PEAK_WARPS))
    drawing = (*read, state.records, state.num_tokens, w.edited, w.edited.stride(0), w.edited_rows, w.best)
    if drawn and floored:
        find_floors(logits, rows, sources, state, workspace, edited=edited)
    if drawn:
        race[chunks, num_rows](
            *drawing, w.floors, w.race_values, w.race_ids, w.sums, vocab, chunks,
            EDITS=edited, CHUNKS=triton.next_power_of_2(chunks), CHUNK=CHUNK, **_options(_RACE_WARPS),
        )  # fmt: skip
    finish[(num_rows,)](
        *drawing, w.floors, w.tops, w.blocks, w.race_values, w.race_ids, w.sums, out_tokens, out_errors, vocab, chunks,
        blocks,
        **finish_constants(vocab, edited, drawn, filtered), **_options(_FINISH_WARPS if filtered else 1),
    )  # fmt: skip


def finish_constants(vocab: int, edited: bool, drawn: bool, filtered: bool) -> dict[str, Any]:
    """Return the compile-time constants of the last kernel."""
    return {
        "EDITS": edited, "DRAWN": drawn, "FILTERED": filtered, "CHUNKS": triton.next_power_of_2(num_chunks(vocab)),
        "BLOCKS": triton.next_power_of_2(num_blocks(vocab)) if filtered else 1, "TILE": _TILE, "SUB": SUB,
        "PIVOTS": _PIVOTS,
    }  # fmt: skip


def _options(num_warps: int) -> dict[str, Any]:
    # Without fusion: each operation of the edits is rounded, as on the CPU.
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}


def _check(
    logits: Tensor,
    rows: Tensor,
    sources: Tensor,
    state: SamplingState,
    workspace: SamplingWorkspace,
    out_tokens: Tensor,
    out_errors: Tensor,
) -> tuple[int, int]:
    """Return (R, vocab); raises ValueError, which names the argument."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or (logits.stride(1) != 1 and logits.shape[1] > 1):
        raise ValueError(
            f"logits must be a float32 matrix with adjacent columns, is {logits.dtype} {list(logits.shape)}"
        )
    num_rows, vocab = rows.shape[0], logits.shape[1]
    check_vocab(vocab)
    if workspace.vocab != vocab:
        raise ValueError(f"workspace is for a vocabulary of {workspace.vocab}, not {vocab}")
    if workspace.best.shape[0] < num_rows:
        raise ValueError(f"workspace is for {workspace.best.shape[0]} rows at most, not {num_rows}")
    check("rows", rows, (num_rows,), torch.int32)
    check("sources", sources, (num_rows,), torch.int32)
    check("out_tokens", out_tokens, (num_rows,), torch.int64)
    check("out_errors", out_errors, (num_rows,), torch.int32)
    slots = state.num_tokens.shape[0]
    check("state.records", state.records, (slots, RECORD_WORDS), torch.int32)
    check("state.num_tokens", state.num_tokens, (slots,), torch.int32)
    check("state.num_prompt_tokens", state.num_prompt_tokens, (slots,), torch.int32)
    check("state.token_ids", state.token_ids, (slots, state.token_ids.shape[1]), torch.int32)
    check("state.counts", state.counts, (slots, vocab), torch.int32)
    check("state.allowed_bits", state.allowed_bits, (slots, num_words(vocab)), torch.int32)
    return num_rows, vocab


def variants() -> list[Variant]:
    """Return the configurations compiled ahead of time: for vocabularies up to each of some powers of two."""
    found = [_peaks(tops, True) for tops in (False, True)] + [_edit(tops, True) for tops in (False, True)]
    found += [_peaks(True, False), _edit(True, False)]
    # Rows of an odd vocabulary, such as GPT-2's 50257, cannot be read 16 bytes at once.
    for vocab, divisible in [(vocab, True) for vocab in VOCABS] + [(VOCABS[1], False)]:
        for edited in (False, True):
            found.append(_race(vocab, divisible, edited))
            for drawn, filtered in ((False, False), (True, False), (True, True)):
                found.append(_finish(vocab, divisible, edited, drawn, filtered))
    return found


_READ = {"logits": "*fp32", "logits_stride": "i32", "rows": "*i32", "sources": "*i32"}
_PEAKS = {**_READ, "best": "*i64", "tops": "*i32", "vocab": "i32", "num_chunks": "i32", "num_blocks": "i32"}
_SLOTS = {
    "records": "*i32", "token_ids": "*i32", "tokens_stride": "i32", "num_tokens": "*i32", "num_prompt_tokens": "*i32",
    "counts": "*i32", "allowed_bits": "*i32", "num_words": "i32", "bias_ids": "*i32", "biases": "*fp32",
    "word_ids": "*i32", "word_following": "*i32", "stop_ids": "*i32",
}  # fmt: skip
_EDITED = {"edited": "*fp32", "edited_stride": "i32", "edited_rows": "*i32"}
_DRAWING = {**_READ, "records": "*i32", "num_tokens": "*i32", **_EDITED, "best": "*i64"}
_RACES = {"floors": "*fp32", "race_values": "*fp32", "race_ids": "*i32", "sums": "*fp32"}
_FOUND = {"out_tokens": "*i64", "out_errors": "*i32"}


def _peaks(tops: bool, divisible: bool) -> Variant:
    constants = {"TOPS": tops, "CHUNK": CHUNK, "SUB": SUB}
    return _variant("peaks" + " tops" * tops, find_peaks, _PEAKS, constants, divisible, _PEAK_WARPS)


def _edit(tops: bool, divisible: bool) -> Variant:
    constants = {"TOPS": tops, "CHUNK": CHUNK, "SUB": SUB, "LANES": _LANES}
    signature = {**_PEAKS, **_SLOTS, **_EDITED}
    return _variant(
        "edit" + " tops" * tops, edit, signature, constants, divisible, _EDIT_WARPS, quick=tops and divisible
    )


def _race(vocab: int, divisible: bool, edited: bool) -> Variant:
    constants = {"EDITS": edited, "CHUNKS": triton.next_power_of_2(num_chunks(vocab)), "CHUNK": CHUNK}
    signature = {**_DRAWING, **_RACES, "vocab": "i32", "num_chunks": "i32"}
    name = f"race vocab{vocab}" + " edits" * edited
    return _variant(name, race, signature, constants, divisible, _RACE_WARPS, quick=edited and vocab == 131072)


def _finish(vocab: int, divisible: bool, edited: bool, drawn: bool, filtered: bool) -> Variant:
    signature = {
        **_DRAWING, "tops": "*i32", "blocks": "*i32", **_RACES, **_FOUND, "vocab": "i32", "num_chunks": "i32",
        "num_blocks": "i32",
    }  # fmt: skip
    name = f"finish vocab{vocab}" + " edits" * edited + (" filters" if filtered else " drawn" if drawn else " greedy")
    return _variant(
        name, finish, signature, finish_constants(vocab, edited, drawn, filtered), divisible,
        _FINISH_WARPS if filtered else 1, quick=vocab == 131072 and edited and filtered,
    )  # fmt: skip


def _variant(
    name: str,
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    divisible: bool,
    num_warps: int,
    quick: bool = False,
) -> Variant:
    sizes = ("logits_stride", "vocab", "edited_stride") if divisible else ("edited_stride",)
    options = _options(num_warps)
    return Variant(
        name=f"sampling {name}{'' if divisible else ' odd'}",
        kernel=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constants=constants,
        divisible=tuple(n for n, kind in signature.items() if kind[0] == "*" or n in sizes),
        num_warps=num_warps,
        num_stages=options["num_stages"],
        fp_fusion=options["enable_fp_fusion"],
        no_spills=True,
        quick=quick,
    )
