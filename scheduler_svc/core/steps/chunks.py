"""Schedules tokens of sequences outside the decode batch: prompt chunks, recomputation, forks, beams."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from cadenza_common.plan.plan import AdmittedSequence, PrefixSource
from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.core.lanes.draft_limits import allow_drafts
from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import Chunk, PlannedStep
from scheduler_svc.core.memory.block_tables import have_same_blocks
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup, held_slot
from scheduler_svc.core.steps.budget import StepBudget
from scheduler_svc.core.steps.pages import cover, describe_pages
from scheduler_svc.core.steps.saves import save_in_chunk


def plan_chunk(lane: Lane, step: PlannedStep, budget: StepBudget, sequence: Sequence) -> list[Sequence]:
    """Schedule as many of a sequence's tokens as the budget allows; returns sequences now fully planned."""
    group = sequence.group
    num_top = group.spec.sampling.num_prompt_logprobs
    siblings = group.running[1:] if not group.forked and group.beam_search is None else []
    num_tokens = min(sequence.num_uncomputed_tokens, budget.chunk)
    if sequence.suspected is not None and not step.is_trial:
        num_tokens = min(num_tokens, max(0, sequence.suspected.start - sequence.num_computed_tokens))
    num_left = num_covered = sequence.num_uncomputed_tokens
    if len(group.sequences) > 1 and (lane.blocks.windows or lane.blocks.states) is not None:
        num_tokens = min(num_tokens, _num_before_waiting(lane, sequence))
    if lane.blocks.windows is not None:
        num_covered = cover(lane, step, sequence, min(num_tokens + 1, num_left))
        num_tokens = min(num_tokens, num_covered)
    if num_top is not None and sequence.needs_prompt_logprobs:
        num_tokens = budget.take_prompt_logprobs(num_tokens, 1 + num_top)
    if siblings and num_tokens == sequence.num_uncomputed_tokens:
        values = group.spec.sampling.num_listed * len(siblings)  # The prompt is the source's.
        if budget.num_sequences <= len(siblings) or not budget.take_values(values):
            num_tokens -= 1  # The fork does not fit the budget of this step.
    if num_left - num_tokens == 1 and num_covered < num_left and num_tokens:
        num_tokens -= 1  # Left alone, the last token would be due, and lacks pages.
    if num_tokens == 0 or not _describe_once(lane, step, budget, sequence):
        return []
    budget.spend(num_tokens)
    samples = _schedule(lane, step, sequence, num_tokens)
    if sequence.num_computed_tokens - num_tokens < sequence.num_prompt_tokens:
        lane.order.on_prompt_tokens(group, sequence.num_computed_tokens)
    if samples and siblings:
        budget.spend(0, num_sequences=len(siblings))
        return _fork(lane, step, sequence, siblings)
    return _file_after_chunk(lane, sequence)


def _num_before_waiting(lane: Lane, source: Sequence) -> int:
    """Number of tokens up to where others go on that wait for this one's KV: they must still find their windows, and
    its state there."""
    waiting = [each.num_computed_tokens for each in lane.prefilling if each.kv_source is source]
    return min(waiting, default=source.num_planned_tokens) - source.num_computed_tokens


def plan_beams(lane: Lane, step: PlannedStep, budget: StepBudget, groups: Iterable[SequenceGroup]) -> None:
    """Schedule the new token of each due beam of these groups, and its next candidates."""
    for group in groups:
        # A late beam, which has been given its token, computes it again as a chunk.
        due = [beam for beam in group.due_beams if beam not in lane.prefilling]
        for beam in due:
            if beam.described:
                step.plan.given_slots.append(held_slot(beam))
                step.plan.given_token_ids.append(beam.output_ids[-1])
            elif not _describe_once(lane, step, budget, beam):
                break
            budget.spend(1)
            _schedule(lane, step, beam, 1)
        else:
            del lane.due_beam_groups[group]


def _schedule(lane: Lane, step: PlannedStep, sequence: Sequence, num_tokens: int) -> bool:
    """Add a chunk to the plan; returns whether the sequence samples (a beam: returns candidates)."""
    slot, context_len = held_slot(sequence), sequence.num_computed_tokens
    is_ready = sequence.num_uncomputed_tokens == 1 and not _is_held(sequence)
    if sequence.requested_prompt_logprobs and (predicted := sequence.predicted_prompt_tokens(num_tokens)):
        step.prompt_logprobs[slot] = sequence, predicted
    samples = sequence.schedule(num_tokens)
    size = lane.spec.block_size
    written = sequence.block_ids[context_len // size : -(-(context_len + num_tokens) // size)]
    step.chunks.append(Chunk(sequence, slot, num_tokens, context_len, samples, written, context_len % size))
    if lane.blocks.snapshots is not None:
        save_in_chunk(lane, step, sequence, context_len, num_tokens)
    sequence.group.num_pending_candidates += samples and sequence.is_beam
    if is_ready:
        step.plan.decode_ready = True
        step.num_drafting += sequence.max_drafts > 0
    else:
        step.plan.scheduled_slots.append(slot)
        step.plan.scheduled_num_tokens.append(num_tokens)
        step.plan.scheduled_samples.append(samples)
    return samples


def _file_after_chunk(lane: Lane, sequence: Sequence) -> list[Sequence]:
    """Move a sequence to the decode batch if its chunk was the last; returned if all of its tokens are planned."""
    if sequence.is_beam:
        if sequence.num_uncomputed_tokens == 0:
            lane.prefilling.discard(sequence)
        return []
    if sequence.fully_planned:
        return [sequence]
    # With one token left it is ready: it decodes in every step with decode_ready.
    if sequence.num_uncomputed_tokens == 1 and not _is_held(sequence):
        lane.start_decoding(sequence)
    return []


def _is_held(sequence: Sequence) -> bool:
    """Whether plans schedule it by name: beams, sequences before their fork, and suspects."""
    return sequence.is_beam or not sequence.group.forked or sequence.suspected is not None


def _fork(lane: Lane, step: PlannedStep, source: Sequence, siblings: list[Sequence]) -> list[Sequence]:
    """Fork: the siblings sample from the logits row that `source` computes in this step.

    A last block that is not full stays shared for now: the next plan copies it, and appends it to the siblings' tables
    on the executor.
    """
    size, num_computed = lane.spec.block_size, source.num_computed_tokens
    num_full = num_computed // size
    group: SequenceGroup = source.group
    fully_planned: list[Sequence] = []
    group.forked = True
    for sibling in siblings:
        sibling.fork(source)
        if lane.blocks.windows is not None:
            lane.blocks.windows.share(source, sibling)
        if lane.blocks.states is not None:
            step.forks.append((source, sibling))
        known = sibling.block_ids[:num_full] if num_computed % size else sibling.block_ids
        prefix = _prefix_source(lane, step, sibling)
        _describe(lane, step, sibling, known, min(num_full * size, num_computed - 1), prefix)
        slot = held_slot(sibling)
        step.plan.fork_source_slots.append(held_slot(source))
        step.plan.fork_slots.append(slot)
        step.chunks.append(Chunk(sibling, slot, 0, num_computed, samples=True))
    if source.suspected is None:
        lane.resuming[source] = None
    for sequence in (*siblings, source):
        fully_planned += _file_after_chunk(lane, sequence)
        if not sequence.fully_planned and num_computed % size:
            lane.pending_copy_on_write[sequence] = sequence is not source
    return fully_planned


def _describe_once(lane: Lane, step: PlannedStep, budget: StepBudget, sequence: Sequence) -> bool:
    """Add a sequence's description to the plan unless the executor has it; False if the plan has no budget for it."""
    if sequence.described:
        return True
    source = _prefix_source(lane, step, sequence)
    sampling, num_sent = sequence.group.spec.sampling, sequence.num_tokens + len(sequence.block_ids)
    num_sent += sampling.num_values
    if source is not None:
        num_sent += sampling.num_listed - sampling.num_values - source.num_tokens - source.num_blocks
    if not budget.take_values(num_sent):
        return False
    _describe(lane, step, sequence, sequence.block_ids, sequence.num_computed_tokens, source)
    return True


def _prefix_source(lane: Lane, step: PlannedStep, sequence: Sequence) -> PrefixSource | None:
    """A described sequence of the same group: the executor takes the prompt, and shared blocks, from its slot."""
    source = next((each for each in sequence.group.sequences if each.described and each is not sequence), None)
    if source is None:
        return None
    slot, num_tokens = held_slot(source), source.num_prompt_tokens
    # Blocks that this plan appends come after its admissions.
    num_appended = step.plan.append_slots.count(slot)
    if lane.blocks.sizes is not None and num_appended:
        num_appended = len(source.block_ids)  # They are pages.
    num_blocks = min(num_tokens // lane.spec.block_size, len(source.block_ids) - num_appended)
    if not have_same_blocks(sequence, source, num_blocks):
        num_blocks = 0
    return PrefixSource(slot, num_tokens, num_blocks)


def _describe(
    lane: Lane,
    step: PlannedStep,
    sequence: Sequence,
    block_ids: list[int],
    num_computed_tokens: int,
    source: PrefixSource | None,
) -> None:
    sequence.described = True
    if lane.spec.max_drafts:
        allow_drafts([sequence], lane.spec)
    else:
        sequence.max_drafts = 0  # It may come from an executor that drafts.
    step.described.append(sequence)
    token_ids = tuple(sequence.output_ids) if source else sequence.token_ids
    admitted = described(
        sequence, held_slot(sequence), token_ids, num_computed_tokens, tuple(block_ids), sequence.admitted_sampling()
    )
    admitted.held, admitted.source = _is_held(sequence), source
    if lane.blocks.sizes is not None:
        describe_pages(lane.blocks, sequence, admitted)
    step.plan.admitted.append(admitted)


def described(
    sequence: Sequence,
    slot: int,
    token_ids: tuple[int, ...],
    num_computed_tokens: int,
    block_ids: tuple[int, ...],
    sampling: SequenceSampling,
) -> AdmittedSequence:
    """Return the description of a sequence, for every way in which one is admitted."""
    spec, num_prompt, index = sequence.group.spec, sequence.num_prompt_tokens, sequence.sample_index
    admitted = AdmittedSequence(slot, token_ids, num_prompt, num_computed_tokens, block_ids, sampling, index)
    if sequence.max_drafts:
        admitted.max_drafts, admitted.max_len = sequence.max_drafts, sequence.max_len
        admitted.draft_scope = sequence.draft_scope
    if spec.sampling.grammar is not None:
        admitted.grammar_turn = turn_of(spec.tenant)
    admitted.adapter_index = spec.adapter_index
    return admitted


def turn_of(tenant: str) -> int:
    """Return a tenant's number, in whose turn executors compile its grammars; 0: there are no tenants."""
    return int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest(), "little") if tenant else 0
