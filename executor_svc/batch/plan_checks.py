"""Checks of a plan against the executor's limits and features, without the state of slots. All raise InvalidPlan."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import AdmittedSequence, BlockMoves, StepPlan
from executor_svc.batch.column_checks import check_range, check_unique
from executor_svc.batch.sampling_checks import check_sampling
from executor_svc.plan.limits import Limits


def check_supported(plan: StepPlan, limits: Limits) -> None:
    """Check that the plan uses only features of this executor."""
    if plan.max_drafts > limits.max_drafts:
        raise InvalidPlan(f"max_drafts {plan.max_drafts} is over the executor's {limits.max_drafts}")
    if plan.reserved:
        raise InvalidPlan(f"not supported by this executor: {', '.join(plan.reserved)}")


def check_block_moves(plan: StepPlan, limits: Limits) -> None:
    """Check block ids, and that no destination is written twice and no result depends on the order of moves."""
    if not any(len(moves.sources) for moves in (plan.swap_out, plan.copies, plan.swap_in)):
        return
    device, host = limits.num_device_blocks, limits.num_host_blocks
    _check_moves(plan.swap_out, device, host, "swap_out")
    _check_moves(plan.copies, device, device, "copies")
    _check_moves(plan.swap_in, host, device, "swap_in")
    both = np.intersect1d(plan.copies.sources, plan.copies.destinations)
    if len(both):
        raise InvalidPlan(f"copies: block {both[0]} is both source and destination")
    reused = np.intersect1d(plan.swap_out.destinations, plan.swap_in.sources)
    if len(reused):
        raise InvalidPlan(f"swap_out: host block {reused[0]} is freed by a swap-in of the same plan")


def _check_moves(moves: BlockMoves, num_sources: int, num_destinations: int, part: str) -> None:
    check_range(moves.sources, num_sources, f"{part}: source block")
    check_range(moves.destinations, num_destinations, f"{part}: destination block")
    check_unique(moves.destinations, f"{part}: destination block")


def check_admission(sequence: AdmittedSequence, limits: Limits) -> None:
    """Check that an admission fits the limits and requests only supported features."""
    where = f"admitted: slot {sequence.slot}"
    if not 0 <= sequence.slot < limits.num_slots:
        raise InvalidPlan(f"{where} is out of range: there are {limits.num_slots}")
    num_tokens = len(sequence.token_ids)
    if not 1 <= num_tokens <= limits.max_model_len:
        raise InvalidPlan(f"{where} has {num_tokens} tokens: 1 to max_model_len {limits.max_model_len} are possible")
    check_range(sequence.token_ids, limits.vocab_size, f"{where}: token id")
    if not 1 <= sequence.num_prompt_tokens <= num_tokens:
        raise InvalidPlan(f"{where}: num_prompt_tokens {sequence.num_prompt_tokens} is not 1 to {num_tokens}")
    if not 0 <= sequence.num_computed_tokens < num_tokens:
        raise InvalidPlan(f"{where}: num_computed_tokens {sequence.num_computed_tokens} is not below {num_tokens}")
    num_blocks = len(sequence.block_ids)
    if num_blocks > limits.max_blocks_per_seq:
        raise InvalidPlan(f"{where} has {num_blocks} blocks: over the {limits.max_blocks_per_seq} of max_model_len")
    check_range(sequence.block_ids, limits.num_device_blocks, f"{where}: block")
    if sequence.num_computed_tokens > num_blocks * limits.block_size:
        raise InvalidPlan(
            f"{where}: {num_blocks} blocks are too few for {sequence.num_computed_tokens} computed tokens"
        )
    if not 0 <= sequence.max_drafts <= limits.max_drafts:
        raise InvalidPlan(f"{where}: max_drafts {sequence.max_drafts} is not 0 to {limits.max_drafts}")
    if sequence.max_len and not num_tokens < sequence.max_len <= limits.max_model_len:
        raise InvalidPlan(f"{where}: max_len {sequence.max_len} is not {num_tokens + 1} to {limits.max_model_len}")
    if sequence.adapter_index and not limits.max_loras:
        raise InvalidPlan(f"{where}: not supported by this executor: adapter_index")
    if sequence.grammar is not None and not limits.has_grammars:
        raise InvalidPlan(f"{where}: not supported by this executor: grammar")
    check_sampling(sequence.sampling, limits, where)
