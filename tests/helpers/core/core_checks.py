"""Checks of the core's adapters, of what it gives a beam search, and of prompt logprobs, against the known ones."""

from __future__ import annotations

from collections.abc import Iterable

from cadenza_common.plan.result import LogprobColumns
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequences.beams import Hypothesis
from scheduler_svc.core.types import ExecutorSpec, FinishDetail, RequestSpec
from tests.helpers.core.core_histories import MAX_MODEL_LEN
from tests.helpers.core.known import as_lists, known_beams, known_cuts, known_prompt_logprobs
from tests.helpers.core.lane_rig import LaneRig


def check_adapters(core: Scheduler, rig: LaneRig) -> None:
    """No more adapters run than may, and those are loaded; what waits for one waits outside of the queue."""
    lanes = core.lanes.values()
    running = core.lanes[rig.executor_id].running.num_by_adapter
    assert len(running) <= rig.spec.max_loras
    assert running.keys() <= {each.index for each in rig.executor.adapters.loaded}
    for group in core.waiting:
        assert any(lane.adapters.has(group.spec.adapter_index) for lane in lanes)
    for group in core.adapters.parked:
        assert not any(lane.adapters.has(group.spec.adapter_index) for lane in lanes)


def check_beams(
    spec: RequestSpec, found: list[Hypothesis], pools: Iterable[ExecutorSpec], *, was_aborted: bool
) -> None:
    """Check that all of a search's results are there, the best first; pools: of all executors that there were."""
    assert len(found) == spec.num_samples
    best = known_beams(spec, MAX_MODEL_LEN)
    missing = [one for one in found[len(best) :] if one.finish.detail is FinishDetail.NO_ALLOWED_TOKEN]
    if found != [*best, *missing]:
        assert spec.beams is not None
        by = FinishDetail.ABORTED if was_aborted else FinishDetail.KV_CAPACITY
        may_be_cut = any(_most_blocks(spec, pool) > pool.num_blocks for pool in pools)
        assert was_aborted or may_be_cut, "what fits is not cut"
        cuts = known_cuts(spec, MAX_MODEL_LEN, by)
        assert any(found[: len(cut)] == cut and not any(one.token_ids for one in found[len(cut) :]) for cut in cuts)


def _most_blocks(spec: RequestSpec, pool: ExecutorSpec) -> int:
    """Pages that the group may hold at once, if it shares none but the prompt's: with one for each copy."""
    longest = min(len(spec.prompt_token_ids) + (spec.max_tokens or MAX_MODEL_LEN), MAX_MODEL_LEN)
    num_shared = len(spec.prompt_token_ids) // pool.block_size
    num_blocks = num_shared + spec.num_sequences * (longest // pool.block_size + 2 - num_shared)
    return num_blocks * (sum(group.pages_per_block for group in pool.kv_groups) or 1)


def check_prompt_logprobs(spec: RequestSpec, parts: list[LogprobColumns], *, has_output: bool) -> None:
    """Each row once and in order; all of them if there is any output."""
    end, num_top = 1, spec.sampling.num_prompt_logprobs
    for part in parts:
        assert part.start == end
        assert num_top is not None
        end = part.end
        known = known_prompt_logprobs(spec.prompt_token_ids[:end], num_top, part.start, spec.adapter_index)
        assert as_lists(part) == known
    if num_top is not None and has_output:
        assert end == len(spec.prompt_token_ids)
