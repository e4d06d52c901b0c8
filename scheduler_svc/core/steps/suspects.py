"""Finds the request that kills executors, at the cost of that request alone.

When an executor dies, the requests of the plans that it may have begun are suspects, each for the positions that these
plans were to compute. Suspects are computed again up to these positions like all others. They compute these positions
in a *trial*: a step that no other plan accompanies, with at most half of the suspects. If it completes, they are
cleared. If the executor dies in it, the others are cleared. So each death in a trial halves the suspects. Suspects of
several deaths are kept separate, since several requests may be to blame: a trial tries those of one death. A request
ends with an error after MAX_DEATHS_ALONE deaths at one position, in trials without another request that were known to
have begun: no death for another reason counts but one within these few milliseconds.
"""

from __future__ import annotations

from scheduler_svc.core.lanes.lane import Lane
from scheduler_svc.core.lanes.planned_step import PlannedStep
from scheduler_svc.core.request_table import BegunSteps, RequestTable, Suspicion
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.steps.results import context_lens
from scheduler_svc.core.types import Finish, FinishDetail, SequenceState, SessionEnd

MAX_DEATHS_ALONE = 3
"""A request whose trials without another request end in this many deaths at one position finishes with an error."""
_MAX_OTHER_DEATHS = 2
"""A suspect is left out of the suspects of this many later deaths outside of trials."""
_MAX_BEGUN_STEPS = 2
"""An executor begins at most this many steps at once."""


def begun_steps(lane: Lane, end: SessionEnd) -> BegunSteps:
    """The lane's plans in flight that may have ended its executor: the plans it may have begun, or the failed plan.

    None if a signal stopped the executor.
    """
    steps = [] if end.executor_stopped else list(lane.inflight)[:_MAX_BEGUN_STEPS]
    if end.failed_step_id:
        steps = [step for step in lane.inflight if step.plan.step_id == end.failed_step_id]
    computed: dict[Sequence, range] = {}
    for step in steps:
        num_tokens = {chunk.sequence: chunk.num_tokens for chunk in step.chunks}
        for sequence, context_len in context_lens(lane, step).items():
            former = computed.get(sequence, range(context_len, context_len))
            num_drafted = min(step.plan.max_drafts, sequence.max_drafts)
            computed[sequence] = range(former.start, former.stop + num_tokens.get(sequence, 1) + num_drafted)
    is_known = bool(steps) and max(end.begun_step_id, end.failed_step_id) >= steps[0].plan.step_id
    return BegunSteps(computed, bool(steps) and steps[0].is_trial, is_known)


def record_death(requests: RequestTable, begun: BegunSteps) -> None:
    """Suspect the requests of the steps in which an executor died, and finish a request that is found guilty."""
    found = _by_group(begun.computed)
    if begun.is_trial:
        death = next((requests.suspects[group].death for group in found if group in requests.suspects), 0)
    else:
        _leave_out_bystanders(requests, found)
        death = 0
    if not found:
        return
    for group in [group for group, suspicion in requests.suspects.items() if suspicion.death == death]:
        if group not in found:
            _clear(requests, group)
    if not death:
        requests.num_deaths += 1
        death = requests.num_deaths
    is_alone = len(found) == 1 and begun.is_trial and begun.is_known
    for group, positions in found.items():
        former = requests.suspects.get(group, Suspicion(death, {}, 0))
        num_deaths = (former.num_deaths_alone if _overlap(former.positions, positions) else 0) + is_alone
        if num_deaths >= MAX_DEATHS_ALONE:
            requests.finish_group(group, Finish(FinishDetail.EXECUTOR_ERROR))
            continue
        requests.num_suspected += group not in requests.suspects
        group.was_suspected = True
        requests.suspects[group] = Suspicion(death, former.positions | positions, num_deaths)
        for sequence, suspected in positions.items():
            sequence.suspected = suspected


def clear_passed(requests: RequestTable, step: PlannedStep) -> None:
    """Clear the sequences that have computed their suspected positions with this step."""
    ends = {chunk.sequence: chunk.context_len + chunk.num_tokens for chunk in step.chunks}
    for suspicion in list(requests.suspects.values()):
        for sequence, suspected in list(suspicion.positions.items()):
            if ends.get(sequence, 0) >= suspected.stop:
                clear_sequence(requests, sequence)


def clear_sequence(requests: RequestTable, sequence: Sequence) -> None:
    """Clear a suspected sequence."""
    suspicion = requests.suspects[sequence.group]
    del suspicion.positions[sequence]
    if not suspicion.positions:
        del requests.suspects[sequence.group]
    _release(requests, sequence)


def next_trial(requests: RequestTable, lane: Lane) -> list[SequenceGroup]:
    """The suspects to try in the lane's next step: at most half of one death's, from the first death with a ready one.

    In order of arrival; empty: none is ready.
    """
    ready = [
        group
        for group in requests.suspects
        if group.lane_id == lane.executor_id and any(is_ready(sequence) for sequence in group.sequences)
    ]
    death = min((requests.suspects[group].death for group in ready), default=0)
    num_suspects = sum(suspicion.death == death for suspicion in requests.suspects.values())
    ready = [group for group in ready if requests.suspects[group].death == death]
    ready.sort(key=lambda group: group.arrival_number)
    return ready[: (num_suspects + 1) // 2]


def is_ready(sequence: Sequence) -> bool:
    """Whether a suspected sequence has computed everything before its suspected positions."""
    return (
        sequence.suspected is not None
        and sequence.slot is not None
        and sequence.may_compute
        and sequence.num_uncomputed_tokens > 0
        and sequence.num_computed_tokens >= sequence.suspected.start
    )


def _leave_out_bystanders(requests: RequestTable, found: dict[SequenceGroup, dict[Sequence, range]]) -> None:
    """Remove suspects of earlier deaths, which were computing what comes before their suspected positions.

    They stay if nothing else explains the death, or if it is not the first such death.
    """
    suspects = [group for group in found if group in requests.suspects]
    if len(suspects) == len(found):
        return
    for group in suspects:
        suspicion = requests.suspects[group]
        if suspicion.num_other_deaths < _MAX_OTHER_DEATHS:
            suspicion.num_other_deaths += 1
            del found[group]


def _by_group(positions: dict[Sequence, range]) -> dict[SequenceGroup, dict[Sequence, range]]:
    groups: dict[SequenceGroup, dict[Sequence, range]] = {}
    for sequence, each in positions.items():
        if each and sequence.state is not SequenceState.FINISHED:
            groups.setdefault(sequence.group, {})[sequence] = each
    return groups


def _overlap(former: dict[Sequence, range], positions: dict[Sequence, range]) -> bool:
    """Whether they have a position in common: all sequences of a group count as one, since they begin alike."""
    return any(
        max(before.start, now.start) < min(before.stop, now.stop)
        for before in former.values()
        for now in positions.values()
    )


def _clear(requests: RequestTable, group: SequenceGroup) -> None:
    for sequence in requests.suspects.pop(group).positions:
        _release(requests, sequence)


def _release(requests: RequestTable, sequence: Sequence) -> None:
    """Let a sequence go on like all others: the executor held it until plans named it."""
    sequence.suspected = None
    lane = requests.lane_of(sequence.group)
    if lane is None or sequence.slot is None or sequence.is_beam or not sequence.group.forked:
        return
    if sequence.described:
        lane.resuming[sequence] = None
        if sequence.num_uncomputed_tokens == 1 and not sequence.is_decoding:
            lane.start_decoding(sequence)
