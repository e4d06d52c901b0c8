"""Checks of a plan against the executor's limits and features, without the state of slots. All raise InvalidPlan."""

from __future__ import annotations

import numpy as np

from cadenza_common.plan.errors import InvalidPlan
from cadenza_common.plan.plan import KV_GROUP, AdmittedSequence, BlockMoves, StepPlan
from cadenza_common.plan.sampling import COLUMNS, MAX_CANDIDATES, SequenceSampling
from executor_svc.batch.block_tables import check_tables
from executor_svc.plan.arrays import check_range, check_unique
from executor_svc.plan.limits import Limits

_OF_GROUPS = tuple(f"{part}.{name}" for part in ("appends", "block_tables") for name in (KV_GROUP, "first_block"))
"""Names of what executors of several KV groups support, in `StepPlan.reserved`."""


def check_supported(plan: StepPlan, limits: Limits) -> None:
    """Check that the plan uses only features of this executor."""
    if plan.max_drafts > limits.max_drafts:
        raise InvalidPlan(f"max_drafts {plan.max_drafts} is over the executor's {limits.max_drafts}")
    reserved = plan.reserved
    if limits.kv_groups:
        reserved = tuple(name for name in reserved if not name.startswith(_OF_GROUPS))
    if reserved:
        raise InvalidPlan(f"not supported by this executor: {', '.join(reserved)}")
    if plan.state_saves and not limits.pages_per_state:
        raise InvalidPlan("not supported by this executor: state_saves, as the model has no recurrent state")


def changes_ready(plan: StepPlan) -> bool:
    """Return whether the plan may change which slots are ready: blocks and saves alone do not."""
    return bool(
        plan.admitted
        or len(plan.released_slots)
        or len(plan.held_slots)
        or len(plan.resumed_slots)
        or len(plan.given_slots)
    )


def changes_slots(plan: StepPlan) -> bool:
    """Return whether the plan has anything that slots apply: most plans only let all go on."""
    return bool(changes_ready(plan) or len(plan.append_slots) or plan.group_appends or plan.state_saves)


def check_block_moves(plan: StepPlan, limits: Limits) -> None:
    """Check block ids, and that no destination is written twice and no result depends on the order of moves."""
    if not (plan.swap_out or plan.copies or plan.swap_in):
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
    check_tables(sequence, limits, where)
    _check_state_pages(sequence, limits, where)
    if not 0 <= sequence.max_drafts <= limits.max_drafts:
        raise InvalidPlan(f"{where}: max_drafts {sequence.max_drafts} is not 0 to {limits.max_drafts}")
    if sequence.max_len and not num_tokens < sequence.max_len <= limits.max_model_len:
        raise InvalidPlan(f"{where}: max_len {sequence.max_len} is not {num_tokens + 1} to {limits.max_model_len}")
    if sequence.adapter_index and not limits.max_loras:
        raise InvalidPlan(f"{where}: not supported by this executor: adapter_index")
    if sequence.grammar is not None and not limits.has_grammars:
        raise InvalidPlan(f"{where}: not supported by this executor: grammar")
    check_sampling(sequence.sampling, limits, where)


def _check_state_pages(sequence: AdmittedSequence, limits: Limits, where: str) -> None:
    pages = sequence.state_pages
    if len(pages) != limits.pages_per_state:
        raise InvalidPlan(f"{where} has {len(pages)} state_pages: a state has {limits.pages_per_state}")
    check_range(pages, limits.num_device_blocks, f"{where}: state_pages: page")
    check_unique(pages, f"{where}: state_pages: page")


def check_sampling(sampling: SequenceSampling, limits: Limits, where: str) -> None:
    """Check every field; messages begin with `where`."""
    most = min(MAX_CANDIDATES, limits.vocab_size)
    if not 0 <= sampling.num_candidates <= most:
        raise InvalidPlan(f"{where}: num_candidates {sampling.num_candidates} is not 0 to {most}")
    for name, column in COLUMNS.items():
        if not column.is_valid(value := getattr(sampling, name)):
            raise InvalidPlan(f"{where}: {name} {value} is not {column.must_be}")
    for name in ("num_logprobs", "num_prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and not 0 <= value <= limits.max_logprobs:
            raise InvalidPlan(f"{where}: {name} {value} is not 0 to max_logprobs {limits.max_logprobs}")
    _check_token_ids(sampling, limits, where)


def _check_token_ids(sampling: SequenceSampling, limits: Limits, where: str) -> None:
    vocab = limits.vocab_size
    check_range(sampling.stop_token_ids, vocab, f"{where}: stop token id")
    if sampling.min_tokens and len(np.unique(sampling.stop_token_ids)) >= vocab:
        raise InvalidPlan(f"{where}: every token id is a stop token, so min_tokens leaves none to choose")
    if len(sampling.bias_token_ids) != len(sampling.biases):
        raise InvalidPlan(
            f"{where}: biases: {len(sampling.biases)} values for {len(sampling.bias_token_ids)} bias_token_ids"
        )
    check_range(sampling.bias_token_ids, vocab, f"{where}: bias token id")
    check_unique(sampling.bias_token_ids, f"{where}: bias token id")
    biases = np.asarray(sampling.biases, np.float32)
    if not np.isfinite(biases).all():
        bad = np.flatnonzero(~np.isfinite(biases))[0]
        token_id = sampling.bias_token_ids[bad]
        raise InvalidPlan(f"{where}: biases: {biases[bad]} of token id {token_id} is not finite")
    check_range(sampling.allowed_token_ids, vocab, f"{where}: allowed token id")
    for index, word in enumerate(sampling.bad_words):
        if not len(word):
            raise InvalidPlan(f"{where}: bad_words: word {index} is empty")
        check_range(word, vocab, f"{where}: bad_words: token id")
