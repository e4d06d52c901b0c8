"""Warm-up of a GPU before the first step: the largest steps before KV pools are sized, then steps of each kind.

A kernel is compiled when it is first launched, which takes a second or more: no request should wait for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np

from cadenza_common.plan.plan import AdmittedSequence, GroupTable, StepPlan
from cadenza_common.plan.sampling import Need, SequenceSampling
from executor_svc.gpu.kernels.attention.segments import SEGMENTS
from executor_svc.gpu.kernels.exact.attention_config import SEGMENT_KEYS
from executor_svc.gpu.kernels.few_bits import linear as few_bits
from executor_svc.gpu.kernels.linear_w8 import TILE_ROWS
from executor_svc.gpu.step import GpuStepExecutor
from executor_svc.plan.arrays import IntArray
from executor_svc.plan.limits import Limits
from executor_svc.plan.sampling import in_warm_up
from executor_svc.worker.worker import Executor

_LENGTH = 2
"""Tokens of the sequences in steps of each kind: together with the sampled tokens they fit into one block."""
_DRAFTED = 4
"""Tokens that a sequence may get in the two steps with a draft each."""
_EVERYTHING = in_warm_up()
_DRAWN = in_warm_up(Need.SEARCH, Need.NOTHING)
_NUCLEUS = replace(in_warm_up(Need.FLOOR, Need.NOTHING), temperature=1e3, top_k=0, top_p=0.999)
"""Draws from the whole vocabulary and, sorted, from nearly all of it: both need most memory in PyTorch's sampling."""
_CANDIDATES = SequenceSampling(repetition_penalty=2.0, num_candidates=2)
"""The parameters of beam search."""


def run_largest_steps(executor: Executor) -> None:
    """Run the steps that need the most memory, all of them in the first block; afterwards all slots are free.

    They compute max_num_batched_tokens tokens, of one sequence and of max_num_seqs, and sample a token for each. With
    places for adapters so do steps with adapters, and one of a single token.
    """
    token_counts = executor.token_counts if isinstance(executor, GpuStepExecutor) else []
    _run_each(executor, _of_counts(token_counts, executor.limits))
    _run_each(executor, _largest(executor.limits))
    if (adapted := _adapted(executor)) is not None:
        with adapted:
            _run_each(executor, _largest_adapted(executor.limits))


def _run_each(executor: Executor, plans: Iterable[StepPlan]) -> None:
    for plan in plans:
        executor.launch(plan, 0).result()
        executor.clear()


def _adapted(executor: Executor) -> AbstractContextManager[None] | None:
    return executor.adapted() if isinstance(executor, GpuStepExecutor) else None


def run_steps(executor: Executor) -> None:
    """Run a step of each kind with its own kernels, in the first slot and block; afterwards all slots are free.

    Samplers and decode graphs compile their own kernels when they are created. Must be called before any block holds
    KV.
    """
    for round in (nullcontext(), _adapted(executor)):
        if round is not None:
            with round:
                for plan in _each_kind(executor.limits):
                    executor.launch(plan, 0).result()
            executor.clear()


def _of_counts(counts: Iterable[int], limits: Limits) -> Iterator[StepPlan]:
    """Yield a step of each number of tokens that a step can have."""
    for count in counts:
        num_seqs = -(-count // limits.max_model_len)
        if count < limits.max_num_batched_tokens and num_seqs <= limits.max_num_seqs:
            yield _prompts(np.diff(np.arange(num_seqs + 1) * count // num_seqs), SequenceSampling(), limits)


def _largest(limits: Limits) -> Iterator[StepPlan]:
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    # Shorter prompts first: linears have other kernels for few rows.
    tile_rows = sorted({*TILE_ROWS, *few_bits.TILE_ROWS})
    for length in (*(rows for rows in tile_rows if rows < longest), longest):
        yield _prompts(np.array([length]), _EVERYTHING, limits)
    # The linear to the logits has a row for each sequence.
    for rows in tile_rows:
        if rows < limits.max_num_seqs:
            yield _prompts(np.ones(rows, np.int64), SequenceSampling(), limits)
    for sampling in (_DRAWN, _NUCLEUS, _CANDIDATES):
        yield _prompts(_most_sequences(limits), sampling, limits)


def _largest_adapted(limits: Limits) -> Iterator[StepPlan]:
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    for counts in (np.array([1]), np.array([longest]), _most_sequences(limits)):
        yield _prompts(counts, SequenceSampling(), limits)


def _most_sequences(limits: Limits) -> IntArray:
    """Return the tokens of each of the most sequences, together as many as a step may have."""
    num_seqs = limits.max_num_seqs
    total = min(limits.max_num_batched_tokens, num_seqs * limits.max_model_len)
    counts: IntArray = np.diff(np.arange(num_seqs + 1) * total // num_seqs)
    return counts


def _prompts(counts: IntArray, sampling: SequenceSampling, limits: Limits) -> StepPlan:
    """Return a step of sequences with counts[i] tokens in slot i; all their block table entries are the first page."""
    admitted = []
    for slot, count in enumerate(counts.tolist()):
        num_blocks = -(-count // limits.block_size)
        first, *others = [[0] * (num_blocks * group.pages_per_block) for group in limits.groups]
        tables = [GroupTable(index, 0, pages) for index, pages in enumerate(others, 1)]
        admitted.append(
            AdmittedSequence(
                slot, [0] * count, count, 0, first, sampling, group_tables=tables, state_pages=_state_pages(limits)
            )
        )
    return StepPlan(
        1,
        epoch=1,
        admitted=admitted,
        scheduled_slots=list(range(len(counts))),
        scheduled_num_tokens=counts.tolist(),
        scheduled_samples=[True] * len(counts),
    )


def _state_pages(limits: Limits) -> list[int]:
    """Return the last pages of the pool, of all sequences here: where a state is garbage, its numbers are too."""
    return list(range(limits.num_device_blocks - limits.pages_per_state, limits.num_device_blocks))


def _each_kind(limits: Limits) -> Iterator[StepPlan]:
    if limits.max_num_batched_tokens < _LENGTH or limits.max_model_len <= _LENGTH:
        return
    # A prompt with logprobs, draws and counts; then a decode, by a graph.
    yield _prompts(np.array([_LENGTH]), _EVERYTHING, limits)
    yield StepPlan(2, epoch=1, decode_ready=True)
    # One token of a short sequence, and of ones with split keys, in steps without logits: by no graph.
    split = (least + 2 for least in (SEGMENTS.least_keys, SEGMENT_KEYS))
    # A draft goes on from the state that the token before it has left: both have room.
    longest = max(_LENGTH, limits.max_model_len - _DRAFTED) if limits.max_drafts else limits.max_model_len
    for length in dict.fromkeys((_LENGTH, *(min(length, longest) for length in split))):
        yield _one_token(length, limits)
        if limits.max_drafts and length + _DRAFTED <= limits.max_model_len:
            yield _one_draft(length, limits)
            # A head has drafts from a sequence's second step on.
            yield StepPlan(2, epoch=1, decode_ready=True, max_drafts=1)


def _one_token(length: int, limits: Limits) -> StepPlan:
    """Return a step of the last but one token of a prompt of `length` tokens, in the first slot, which was in use."""
    whole = _prompts(np.array([length]), SequenceSampling(), limits)
    (prompt,) = whole.admitted
    return replace(
        whole,
        released_slots=[0],
        admitted=[replace(prompt, num_computed_tokens=length - 2)],
        scheduled_slots=[0],
        scheduled_num_tokens=[1],
        scheduled_samples=[False],
    )


def _one_draft(length: int, limits: Limits) -> StepPlan:
    """Return a decode of a sequence of `length` tokens in the first slot, which was in use, with room for a draft."""
    whole = _prompts(np.array([length]), SequenceSampling(), limits)
    (prompt,) = whole.admitted
    return StepPlan(
        1,
        epoch=1,
        released_slots=[0],
        admitted=[replace(prompt, num_computed_tokens=length - 1, max_drafts=1)],
        decode_ready=True,
        max_drafts=1,
    )
