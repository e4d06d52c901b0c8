"""A step is planned: room for those that decode, chunks of those that do not yet, admissions, releases."""

from __future__ import annotations

from scheduler_svc.core.book import RequestBook
from scheduler_svc.core.budget import StepBudget
from scheduler_svc.core.lane import Chunk, Lane, PlannedStep
from scheduler_svc.core.sequence import Sequence, held_slot
from scheduler_svc.core.types import AdmittedSequence, Finish, FinishDetail, StepPlan


def plan_step(book: RequestBook, lane: Lane, plan: StepPlan, now: float) -> PlannedStep | None:
    """Fill in an empty plan; None if there is nothing to do or to tell."""
    step = PlannedStep(plan, now)
    spec = lane.spec
    budget = StepBudget(spec.max_num_batched_tokens, spec.max_num_seqs, book.rules.long_prefill_token_threshold)
    num_admissible = book.rules.batching.num_admissible(lane, book.waiting, now, draining=book.draining)
    if num_admissible and book.rules.order.preemptive:
        _make_way(book, lane, step)
    memory_is_short = _make_room(book, lane, step)
    ending = _plan_decodes(lane, step, budget)
    for sequence in list(lane.prefilling):
        if budget.exhausted:
            break
        ending += _plan_chunk(lane, step, budget, sequence)
    # Who was pushed out for want of memory would be let in again at once.
    if not memory_is_short:
        ending += _admit(book, lane, step, budget, num_admissible)
    plan.released_slots = lane.slots.releases_for(plan.step_id)
    step.retired, lane.retired = lane.retired, []
    # Only now: what they hold belongs to this step, and is free for the next one.
    for sequence in ending:
        lane.retire(sequence)
    return step if step.total_tokens or plan.released_slots else None


def _make_way(book: RequestBook, lane: Lane, step: PlannedStep) -> None:
    """Push out running groups of a higher level than the next to join, if that makes enough room for it."""
    head = book.waiting.head(step.planned_at)
    if head is None or head.sequences[0].num_pending:
        return
    order = book.rules.order
    num_tokens = _num_reserved(book, lane, head.sequences[0])
    level, num_seqs, num_blocks = order.level(head), len(lane.running), 0
    victims: list[Sequence] = []
    for sequence in lane.running.victims(book.waiting, step.planned_at):
        fits = lane.blocks.can_admit(num_tokens, alone=num_seqs == 0, num_more=num_blocks)
        if fits and num_seqs < lane.spec.max_num_seqs:
            break
        if order.level(sequence.group) <= level or book.waiting.is_overdue(sequence.group, step.planned_at):
            return
        victims.append(sequence)
        num_seqs, num_blocks = num_seqs - 1, num_blocks + len(sequence.block_ids)
    for victim in victims:
        _preempt(book, lane, step, victim)


def _make_room(book: RequestBook, lane: Lane, step: PlannedStep) -> bool:
    """A block more for each member of the cohort that outgrows its own; victims go while there are too few.

    Returns whether any had to go.
    """
    victims: list[Sequence] | None = None
    while len(outgrowing := lane.cohort.outgrowing) > lane.blocks.num_free:
        victims = victims or lane.running.victims(book.waiting, step.planned_at)[::-1]
        victim = victims.pop()
        if len(lane.running) == 1:
            _end_at_capacity(book, lane, victim)
        else:
            _preempt(book, lane, step, victim)
    if not outgrowing:
        return victims is not None
    block_ids = lane.blocks.take(len(outgrowing))
    lane.cohort.give_blocks(outgrowing, block_ids)
    step.plan.append_slots = [held_slot(sequence) for sequence in outgrowing]
    step.plan.append_block_ids = block_ids
    step.appended = list(zip(outgrowing, block_ids, strict=True))
    return victims is not None


def _end_at_capacity(book: RequestBook, lane: Lane, sequence: Sequence) -> None:
    """Alone, a sequence has filled the pool: it ends with the tokens that it has or that are under way."""
    if sequence.num_pending == 0:
        book.end(sequence, Finish(FinishDetail.KV_CAPACITY))
    else:
        lane.retire(sequence)
        sequence.limit_to_planned(FinishDetail.KV_CAPACITY)


def _preempt(book: RequestBook, lane: Lane, step: PlannedStep, sequence: Sequence) -> None:
    """Preemption by recompute: blocks and slot go, tokens stay, those under way too."""
    lane.leave(sequence)
    step.preempted.append(sequence)
    sequence.group.num_preemptions += 1
    book.num_preemptions += 1
    book.wait_again(sequence)


def _plan_decodes(lane: Lane, step: PlannedStep, budget: StepBudget) -> list[Sequence]:
    """Every member of the cohort computes a token: the plan's short form says so. Returns those it is the last of."""
    if not len(lane.cohort):
        return []
    step.plan.decode_ready = True
    step.cohort_slots = lane.cohort.slots.copy()
    budget.spend(len(step.cohort_slots), num_sequences=len(step.cohort_slots))
    return lane.cohort.advance()


def _plan_chunk(lane: Lane, step: PlannedStep, budget: StepBudget, sequence: Sequence) -> list[Sequence]:
    """Compute as many of a sequence's tokens as the budget allows. Returns it if that plans its last token."""
    num_tokens = min(sequence.num_uncomputed_tokens, budget.chunk)
    budget.spend(num_tokens)
    slot, context_len = held_slot(sequence), sequence.num_computed_tokens
    is_ready = sequence.num_uncomputed_tokens == 1
    if sequence.asks_prompt_logprobs and (predicted := sequence.predicted_prompt_tokens(num_tokens)):
        step.prompt_logprobs[slot] = sequence, predicted
    samples = sequence.compute(num_tokens)
    step.chunks.append(Chunk(sequence, slot, num_tokens, context_len, samples))
    if is_ready:
        step.plan.decode_ready = True
    else:
        step.plan.scheduled_slots.append(slot)
        step.plan.scheduled_num_tokens.append(num_tokens)
        step.plan.scheduled_samples.append(samples)
    if sequence.fully_planned:
        return [sequence]
    # With one token left it is ready, and will decode in every step that lets those that are ready do so.
    if sequence.num_uncomputed_tokens == 1:
        lane.start_decoding(sequence)
    return []


def _admit(book: RequestBook, lane: Lane, step: PlannedStep, budget: StepBudget, num_admissible: int) -> list[Sequence]:
    """Let waiting groups in while there is room. Returns those whose only token this step plans."""
    ending: list[Sequence] = []
    memory_is_full = False
    while len(step.joined) < num_admissible and (group := book.waiting.head(step.planned_at)) is not None:
        sequence = group.sequences[0]
        room = len(lane.running) < lane.spec.max_num_seqs and lane.slots.num_free > 0
        if not room or budget.exhausted or sequence.num_pending > 0:
            break
        if (too_long := lane.too_long(sequence)) is not None:
            book.end(sequence, Finish(too_long))
            continue
        num_tokens = _num_reserved(book, lane, sequence)
        memory_is_full = not lane.blocks.can_admit(num_tokens, alone=len(lane.running) == 0)
        if memory_is_full or not budget.take_values(len(sequence.token_ids) + group.spec.sampling.num_values):
            break
        book.admit(group)
        _describe(lane.enter(sequence, num_tokens), step, sequence)
        ending += _plan_chunk(lane, step, budget, sequence)
    book.rules.batching.joined(len(step.joined), memory_is_full=memory_is_full)
    return ending


def _num_reserved(book: RequestBook, lane: Lane, sequence: Sequence) -> int:
    """Tokens that a newcomer gets blocks for: never more than the whole pool holds."""
    most = lane.spec.num_blocks * lane.spec.block_size
    return max(len(sequence.token_ids), min(book.rules.batching.num_reserved_tokens(sequence), most))


def _describe(slot: int, step: PlannedStep, sequence: Sequence) -> None:
    """Tell the executor, once, of a sequence that has been given this slot."""
    step.joined.append(sequence)
    step.plan.admitted.append(
        AdmittedSequence(
            slot=slot,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(sequence.block_ids),
            sampling=sequence.admitted_sampling(),
            sample_index=sequence.sample_index,
        )
    )
