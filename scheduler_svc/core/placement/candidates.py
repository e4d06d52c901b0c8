"""Which executors can hold a group at all: features, numerics, lengths and sizes; not whether one has room now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from scheduler_svc.core.errors import RequestRejectedError
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.sequences.sequence import SequenceGroup
from scheduler_svc.core.types import ExecutorSpec, RequestSpec, SequenceState

PROMPT_LOGPROBS, LOGITS_PROCESSORS, SAMPLES, BEAMS = "prompt_logprobs", "logits_processors", "samples", "beams"
"""Features that an executor may lack (ExecutorSpec.lacks)."""


def needed_features(spec: RequestSpec) -> frozenset[str]:
    """The features that an executor of this request must have."""
    needed = []
    if spec.sampling.num_prompt_logprobs is not None:
        needed.append(PROMPT_LOGPROBS)
    if any(spec.sampling.edits()):
        needed.append(LOGITS_PROCESSORS)
    if spec.beams is not None:
        needed.append(BEAMS)
    elif spec.num_samples > 1:
        needed.append(SAMPLES)
    return frozenset(needed)


class Misfit(NamedTuple):
    """Why an executor with certain limits can never run a request."""

    check: int
    """The number of the check that failed; an executor that fails a later one comes nearer."""
    field: str
    message: str


def _misfit(spec: RequestSpec, executor: ExecutorSpec, count: int, *, has_output: bool) -> Misfit | None:
    """Check a request against one executor's limits; None if it can run it.

    `count`: its sequences that must run together. With output the lengths are not checked: planning ends samples that
    are too long.
    """
    num_prompt = len(spec.prompt_token_ids)
    if num_prompt + 1 > executor.max_model_len and not has_output:
        longest = executor.max_model_len
        return Misfit(0, "prompt", f"{num_prompt} prompt tokens and one of output exceed max_model_len = {longest}")
    if count > executor.max_num_seqs:
        return Misfit(1, count_field(spec), f"{count} sequences exceed max_num_seqs = {executor.max_num_seqs}")
    needed = first_footprint(executor, num_prompt, count)
    if needed > executor.num_blocks and not has_output:
        needs = f"{num_prompt} prompt tokens and {f'{count} sequences' if count > 1 else 'one of output'}"
        size, most = executor.block_size, executor.num_blocks
        what = f"KV blocks of {size} tokens" if executor.group_sizes is None else "pages of KV"
        return Misfit(2, "prompt", f"{needs} need {needed} {what}; the pool has {most}")
    return None


def first_footprint(executor: ExecutorSpec, num_prompt: int, count: int) -> int:
    """Pages that so many sequences of one prompt need for their first tokens of output."""
    num_blocks, sizes = num_prompt // executor.block_size + 1, executor.group_sizes
    if sizes is None:
        return num_blocks + count - 1
    return sizes.num_pages(num_blocks) + (count - 1) * (sizes.block_pages + sizes.state_pages)


def check_fits_one(
    spec: RequestSpec, executors: Iterable[ExecutorSpec], count: int, *, has_output: bool = False
) -> None:
    """Raise RequestRejectedError if no single executor can run the request; the message is that of the nearest one."""
    found: list[Misfit] = []
    for executor in executors:
        misfit = _misfit(spec, executor, count, has_output=has_output)
        if misfit is None:
            return
        found.append(misfit)
    nearest = max(found, key=lambda each: each.check)
    raise RequestRejectedError(nearest.field, nearest.message)


def count_field(spec: RequestSpec) -> str:
    """The field that sets the number of sequences."""
    return "sampling_params.beam_width" if spec.beams else "sampling_params.n"


def kinds_of(lanes: Iterable[Lane]) -> list[list[Lane]]:
    """The lanes by kind: those of one kind can hold the same groups, apart from their adapters."""
    kinds: dict[object, list[Lane]] = {}
    for lane in lanes:
        spec = lane.spec
        sizes = spec.num_blocks, spec.block_size, spec.max_num_seqs, spec.max_model_len
        model = spec.kv_groups, spec.pages_per_state, spec.lacks, spec.grammar_engine, spec.numerics
        kinds.setdefault((sizes, model), []).append(lane)
    return list(kinds.values())


def able_lanes(group: SequenceGroup, kinds: Iterable[list[Lane]]) -> list[Lane]:
    """The lanes that can hold a waiting group to its end, or further than all others: its tokens must not depend on
    where it runs. They have its adapter loaded."""
    able = holding_lanes(group, kinds)
    return [lane for lane in able if has_adapter(lane, group)] if group.spec.adapter_index else able


def holding_lanes(group: SequenceGroup, kinds: Iterable[list[Lane]]) -> list[Lane]:
    """As `able_lanes`, and also lanes that can still load its adapter."""
    index, size = group.spec.adapter_index, present_size(group)
    able: list[Lane] = []
    longest = 0
    for lanes in kinds:
        first = lanes[0]
        if not (may_continue(first, group) and _holds(first, group, size)):
            continue
        if index:
            lanes = [lane for lane in lanes if lane.adapters.may_have(index)]
        limit = group.length_limit(first.spec.max_model_len)[0]
        if lanes and limit >= longest:
            able = able + lanes if limit == longest else lanes
            longest = limit
    return able


def may_continue(lane: Lane, group: SequenceGroup) -> bool:
    """Whether the executor has the features and the numerics that the group needs."""
    grammar = group.spec.sampling.grammar
    if grammar is not None and grammar.engine != lane.spec.grammar_engine:
        return False
    if lane.spec.lacks and not lane.spec.lacks.isdisjoint(needed_features(group.spec)):
        return False
    return not group.numerics or group.numerics == lane.spec.numerics or not group.has_output


def takes_groups(lane: Lane) -> bool:
    """Whether groups may be placed on a lane now."""
    return lane.is_open and not lane.draining


def has_adapter(lane: Lane, group: SequenceGroup) -> bool:
    """Whether the executor has the group's adapter loaded, or the group has none."""
    return lane.adapters.has(group.spec.adapter_index)


class PresentSize(NamedTuple):
    """What of a group must run together now: the same for all executors."""

    num_sequences: int
    longest: int
    """Tokens of the longest one."""


def present_size(group: SequenceGroup) -> PresentSize:
    """The sequences of a group that must run together, with their tokens so far."""
    unfinished = [sequence for sequence in group.sequences if sequence.state is not SequenceState.FINISHED]
    count = 1 if group.forked and group.beam_search is None else len(unfinished)
    return PresentSize(count, max((sequence.num_tokens for sequence in unfinished), default=0))


def _holds(lane: Lane, group: SequenceGroup, size: PresentSize) -> bool:
    spec, count, longest = lane.spec, size.num_sequences, size.longest
    if lane.num_kv_tokens <= group.outgrown_kv_tokens:
        return False
    # Beams run together: each has a state.
    num_pages = spec.footprint(longest) + (count - 1) * spec.pages_per_state
    if not group.forked:
        num_pages = first_footprint(spec, len(group.spec.prompt_token_ids), count)
    return count <= spec.max_num_seqs and longest < spec.max_model_len and num_pages <= spec.num_blocks
